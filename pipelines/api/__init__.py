"""APIs of OpenAI, Anthropic and Ollama, without HTTP: bodies, engine requests and answers."""
