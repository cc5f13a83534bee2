"""What castiron is compared with: a NumPy interpreter of the graph, HF transformers, XLA, and small random models.

Imported by tests and by the commands that compare (verify, bench, diff), never by what compiles or runs a model.
"""
