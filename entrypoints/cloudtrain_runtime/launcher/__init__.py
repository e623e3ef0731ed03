"""What one host runs besides its ranks: the agent that starts them, the detection of hangs, secrets, output."""
