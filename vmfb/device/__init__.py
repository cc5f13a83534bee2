"""Bundles loaded into the IREE runtime, on CPU cores or a GPU.

A program is a loaded bundle. Its calls are compiled functions with prepared operands, whose buffers
the runtime reads and updates in place. The threads of a CPU device are its workers. On a GPU, states
stay in device memory, and a call's argmax and logits are copied to the host when they are read.
"""
