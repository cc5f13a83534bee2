"""OpenAI's and Anthropic's APIs: request bodies, engine requests and answers, without HTTP."""
