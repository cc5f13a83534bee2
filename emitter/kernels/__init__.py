"""Kernels as MLIR text, each with the shapes of its operands and a NumPy reference.

The docstring of a module shows its kernel as pseudo-code, with the shapes of values in brackets.
A right column may say where a value is stored: in registers, on the stack or in memory.
"""
