"""Faults put into castiron one at a time, each of which a test has to notice: `make mutants` (docs/trust.md)."""
