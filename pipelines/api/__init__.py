"""APIs of OpenAI, Anthropic and Ollama: request bodies, engine requests and answers, without HTTP."""
