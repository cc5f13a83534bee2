"""OpenAI's API, with the fields and paths that vLLM and llama.cpp add."""
