"""Compiling MLIR text to a bundle and running it; knows neither models nor checkpoints."""
