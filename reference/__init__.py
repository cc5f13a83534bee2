"""References for comparison: a NumPy interpreter, HF transformers, XLA, tiny random models.

Only tests and the commands that compare import it.
"""
