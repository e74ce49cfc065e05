"""Benchmarks that whorl's developers run from a checkout: `python -m bench.calls --json`. Results are in `results`."""
