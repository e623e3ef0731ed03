"""Metrics, profiles and trackers of a run."""
