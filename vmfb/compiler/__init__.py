"""iree-compile: MLIR text to the modules (.vmfb) of a bundle."""
