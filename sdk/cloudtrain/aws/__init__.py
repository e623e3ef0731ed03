"""Access to AWS: errors, retries and downloads."""
