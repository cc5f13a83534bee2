"""A bundle against HF transformers: its tokens, and every module of its checkpoint."""
