"""Compile MLIR text to bundles, and run bundles, for models of any family.

A bundle is a directory or archive with a compiled model, its weights, its tokenizer and a manifest.

- `compiler`: iree-compile, as child processes, with a cache
- `bundle`: the files of a bundle, to write, check and open
- `device`: a bundle loaded into the IREE runtime, on CPU cores or a GPU
- `run`: sequences on a loaded bundle: sessions, batches, states

Files beside these rooms serve all of them.
"""
