"""Attention over a cache in place: heads, rotary embedding and append, one token, a chunk."""
