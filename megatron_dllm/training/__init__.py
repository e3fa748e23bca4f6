"""The loop, schedules, logging, resume, evaluation."""
