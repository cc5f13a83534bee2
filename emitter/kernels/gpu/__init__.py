"""Kernels for GPUs: SPIR-V, CUDA, ROCm and Metal compile the same text."""
