"""Batch jobs: answer each record of an input file; results go to a journal and an output."""
