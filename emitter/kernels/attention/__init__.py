"""Attention kernels over KV caches: rotary embedding with append, decode, and prefill."""
