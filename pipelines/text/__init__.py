"""Convert text to token ids and back: tokenizer, templates, tool calls, reasoning, grammars."""
