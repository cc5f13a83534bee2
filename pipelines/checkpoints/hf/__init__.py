"""Read HF directories: config, safetensors, tokenizer files, quantised weights, encoders."""
