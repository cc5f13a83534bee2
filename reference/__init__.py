"""References for comparison: a NumPy interpreter, HF transformers, XLA, tiny random models.

Only tests, and the commands that compare castiron with these references, import this package.
"""
