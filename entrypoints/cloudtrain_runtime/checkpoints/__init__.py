"""Checkpoints that are whole or do not exist: storage, shards, saving and resuming."""
