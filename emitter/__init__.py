"""The emitter: builds a model's computation as a typed SSA graph and prints it as StableHLO text.

The graph may call kernels, which this package writes as MLIR text. The package imports the standard
library and numpy only, so it works without IREE.
"""
