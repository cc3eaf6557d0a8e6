"""Benchmarks: one file a figure, one runner. `make bench`, or `python -m bench NAME ...`."""
