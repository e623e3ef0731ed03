"""Secrets in files and values: patterns and the scanner that finds them."""
