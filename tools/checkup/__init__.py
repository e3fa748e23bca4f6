"""What tools/doctor.py looks at, and its report."""
