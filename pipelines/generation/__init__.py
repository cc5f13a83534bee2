"""From a prompt to tokens and text; knows a session and a tokenizer, and neither HTTP nor the terminal."""
