"""Suites of tools/verify.py, one a file; each has add_arguments(parser) and run(arguments) -> number of missed figures."""
