"""Build a model's computation as a graph of typed SSA operations, and print it as StableHLO text.

The package imports the standard library and numpy only, so it works without IREE.

    abi       the functions that a module exports, their operands, results and states
    graph     the IR: types, builder, StableHLO operations, verifier, printer
    codecs    formats of stored weights, such as q4_k: reading, checking, quantising
    layers    layer operations such as attention; weights, KV caches and other states
    models    one file per model family
    kernels   kernels as MLIR text
    lowering  layer operations -> StableHLO and calls of kernels
"""
