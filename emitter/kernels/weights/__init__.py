"""Weights as kernels read them: packing, records, panels, and x as products of codes want it."""
