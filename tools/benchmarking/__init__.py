"""The suites of tools/benchmark.py, and the work that they share."""
