"""Compile checkpoints into bundles."""
