"""Compile MLIR text to bundles, and run bundles, for models of any family.

A bundle is a directory or archive with a compiled model, its weights, its tokenizer and a manifest.
"""
