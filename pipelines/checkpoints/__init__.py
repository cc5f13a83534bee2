"""Read checkpoints: GGUF files, HF directories, LoRA adapters, and models on Hugging Face Hub."""
