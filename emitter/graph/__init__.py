"""Graphs of typed SSA operations: builder, StableHLO operations, verifier and printer."""
