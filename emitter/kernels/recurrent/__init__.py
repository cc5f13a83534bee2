"""Kernels of recurrent layers, which update the state of the layer in place."""
