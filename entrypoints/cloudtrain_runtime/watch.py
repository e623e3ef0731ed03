"""Stub."""


def tick(step: int) -> None:
    """Note a step."""
