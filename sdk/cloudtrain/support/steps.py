"""What something that takes long reports while it works."""

from __future__ import annotations


class Steps:
    """Receives the steps of something that takes long. Subclass it and override the methods that you need."""

    def on_progress(self, text: str) -> None:
        """Receive what is done now, in a few words: a step of a rehearsal, a deployment or an installation."""

    def on_detail(self, text: str) -> None:
        """Receive how far the present step is, such as the package that pip downloads."""

    def on_done(self, text: str, seconds: float) -> None:
        """Receive what the present step has done, and the seconds that it took."""
