"""Packing weights for kernels, and emitting MLIR that reads packed weights."""
