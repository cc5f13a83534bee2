"""The APIs of OpenAI, Anthropic and Ollama, without the HTTP server.

This package validates request bodies, converts them to engine requests, and builds the answers.
"""
