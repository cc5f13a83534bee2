"""Kernels for GPUs. The same MLIR is compiled for SPIR-V, CUDA, ROCm and Metal."""
