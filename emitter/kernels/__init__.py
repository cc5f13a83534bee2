"""Kernels of our own as MLIR text: one file a kernel, each with its packing, its shapes and its NumPy definition."""
