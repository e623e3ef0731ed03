"""Submitted runs: status, progress, log lines, checkpoints."""
