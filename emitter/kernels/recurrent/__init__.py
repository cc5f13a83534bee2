"""Kernels of recurrences: what they carry on lives in the state's own storage and is never copied."""
