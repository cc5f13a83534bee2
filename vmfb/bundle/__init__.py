"""The files of a bundle: manifest, compiled modules, weights, tokenizer; as a directory or archive.

Every file has its size and sha256 in the manifest. Files that are damaged, or of another version,
CPU or runtime, are a BundleError.
"""
