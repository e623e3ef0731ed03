"""Account settings: their sources, profiles and trust."""
