"""Batch jobs: answer each record of an input file, and write the results to an output file."""
