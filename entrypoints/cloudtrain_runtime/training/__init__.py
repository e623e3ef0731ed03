"""The training loop and what it consists of."""
