"""Batch jobs: answer each record of an input file, and store results in a journal and an output."""
