"""Where runs run. Backends do not know each other; `api` chooses."""
