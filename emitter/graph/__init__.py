"""Graphs of typed SSA operations: the builder, the checks of each operation, the verifier and the printer."""
