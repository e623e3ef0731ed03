"""Sweeps: search the fields of a job for the best value of a metric, within a budget."""
