"""What tools/plan.py can plan, one module each."""
