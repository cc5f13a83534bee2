"""Records of OpenAI's and Anthropic's APIs, and their conversion to engine requests; no HTTP."""
