"""Benchmarks: ratios to what the same machine does with the same bytes, measured in one run."""
