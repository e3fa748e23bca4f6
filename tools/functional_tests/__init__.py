"""The parts of tools/functional.py: recipes' cases, golden files, their comparison, the runs."""
