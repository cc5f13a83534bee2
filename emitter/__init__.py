"""The emitter: builds a model's computation as a typed SSA graph and prints it as StableHLO text.

Parts of the graph may be calls of castiron's own kernels. The package imports the standard library
and numpy only, so it works without IREE.
"""
