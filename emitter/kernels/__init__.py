"""Kernels as MLIR text, each with the shapes of its operands and a NumPy reference."""
