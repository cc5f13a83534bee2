"""The package that compiles MLIR text to bundles and runs them, for models of any family."""
