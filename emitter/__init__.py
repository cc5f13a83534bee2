"""Build a model's computation as a graph of typed SSA operations, and print it as StableHLO text.

The graph may call kernels, which this package writes as MLIR text. The package imports the standard
library and numpy only, so it works without IREE.
"""
