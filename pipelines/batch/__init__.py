"""Batch jobs: answer each row (record) of an input file; results go to a journal and an output."""
