"""Read and write GGUF files, with the names of HF's configs and tensors."""
