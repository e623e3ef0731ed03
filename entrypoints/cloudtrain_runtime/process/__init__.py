"""One process of a run: environment, events, heartbeat, seeds."""
