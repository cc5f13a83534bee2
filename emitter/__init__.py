"""A checkpoint's mathematics as a typed SSA graph, printed as StableHLO text with kernels of our own.

Imports the standard library and numpy only: this package knows neither IREE nor files.
"""
