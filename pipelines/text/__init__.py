"""Conversion between text and token ids: tokenizer, chat templates, tool calls, reasoning,
grammars."""
