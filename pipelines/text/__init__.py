"""Text on top of the engine: tokenizer, chat templates, tool calls, reasoning and grammars."""
