"""The process of a controller: its start in the background, and what it prints into its log."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

from cloudtrain.backends.container.background import start_background
from cloudtrain.client.home import HOME_VARIABLE
from cloudtrain.controllers.folder import ControllerFolder
from cloudtrain.errors import CloudtrainError, UserError


def start_controller(place: ControllerFolder, module: str, environ: Mapping[str, str]) -> None:
    """Start a controller in the background, and wait until it has the lock.

    Args:
        place: Its folder, which is the argument of the module.
        module: The module of its process.
        environ: Additional environment variables.

    Raises:
        UserError: It ended at once.
    """
    start_background(
        f"the controller of {place.id}",
        [module, str(place.folder)],
        place.log,
        # One that has nothing left to do ends before its lock is seen.
        lambda code: code == 0 or place.is_controlled,
        error=UserError,
        env={**os.environ, **environ, HOME_VARIABLE: str(place.home)},
    )


def run_controller(control: Callable[[Callable[[str], None]], None]) -> int:
    """Call the function of a controller with one that writes a line into its log; return the exit code."""
    try:
        control(print_line)
    except CloudtrainError as error:
        print_line(f"error: {error.for_terminal()}")
        return error.exit_code
    return 0


def print_line(text: str) -> None:
    """Print a line of a controller's log, with the time."""
    # A log that cannot be written, as on a full disk, does not end the controller.
    with contextlib.suppress(OSError):
        os.write(1, f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} {text}\n".encode("utf-8", "replace"))
