"""Read checkpoints: GGUF files, HF directories, LoRA adapters, and models on Hugging Face Hub.

Each becomes a `Checkpoint` with HF's names for config keys and tensors. Its tensors are read from
memory-mapped files when they are needed. A codec is an element type or a quantisation, such as bf16
or q4_k. An HF leaf is a tensor's name inside its layer; `suffix` is "weight" or "bias". Callbacks
named `progress` get (name of a stage, fraction done).

The error CheckpointError names the file. All files may be damaged or hostile.
"""
