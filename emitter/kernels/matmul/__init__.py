"""Kernels for matmuls with packed weights: for one, few or many tokens, and for MoE experts."""
