"""Benchmarks: `ops.py` walks the operators next to their peers; `timing.py` is how anything here is timed."""
