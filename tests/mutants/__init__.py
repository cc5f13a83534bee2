"""Mutants: faults applied to castiron one at a time, each of which a test must notice (docs/trust.md)."""
