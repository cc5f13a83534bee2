"""Kernels for GPUs as MLIR text.

A unit is 8 consecutive elements of a weight row. Operands that a kernel's code gets as `given` are
memrefs by name. `thread` is the index of a thread in its workgroup, and `token` a row of the
operands. A right column of pseudo-code says where a line writes: registers, shared, memory.
"""
