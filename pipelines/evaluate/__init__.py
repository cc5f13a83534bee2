"""Measure bundles: accuracy against HF transformers, perplexity, speed, and tiles to tune."""
