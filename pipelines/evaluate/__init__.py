"""Measure bundles: accuracy against HF transformers, perplexity and speed; tune tile sizes."""
