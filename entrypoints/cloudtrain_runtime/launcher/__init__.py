"""What one host runs besides its ranks: torchrun's agent, the template of workers, the watch for hangs."""
