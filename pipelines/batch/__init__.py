"""Batch jobs: rows of a file become requests for the engine, then a journal and an output file."""
