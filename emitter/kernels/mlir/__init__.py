"""Tools for writing kernels: MLIR text, vector arithmetic, and the vector units of CPUs."""
