"""The local AWS of this machine: serve and stop it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from cloudtrain.backends.sandbox import sandbox_home
from cloudtrain.client.home import find_home, make_home


def stop_sandbox(home: Path | None = None) -> bool:
    """Stop the sandbox and every process that it has started; return False when none ran.

    Args:
        home: The sandbox's folder; by default `sandbox` in the folder of runs.
    """
    from cloudtrain.backends.sandbox.process import stop_sandbox as stop

    return stop(home or sandbox_home(find_home()))


def serve_sandbox(
    *,
    home: Path | None = None,
    port: int = 0,
    most_processes: int = 2,
    stop_grace_seconds: float = 120,
    weather_file: Path | None = None,
    on_ready: Callable[[dict[str, Any]], None],
) -> None:
    """Run the sandbox in this process until it receives a signal to end.

    Args:
        home: The sandbox's folder; by default `sandbox` in the folder of runs.
        port: Port on loopback; 0 takes a free one.
        most_processes: Maximum number of ranks per instance.
        stop_grace_seconds: Seconds between SIGTERM and SIGKILL.
        weather_file: YAML file that lists the faults to inject.
        on_ready: Called with what a client needs, once the sandbox accepts requests.

    Raises:
        UserError: The port, the folder or the file of faults cannot be used.
        MissingExtraError: moto, torch or psutil is not installed.
    """
    from cloudtrain.backends.sandbox.fault_injection import FaultPlan
    from cloudtrain.backends.sandbox.server import ServerOptions, serve

    options = ServerOptions(
        home=(home or sandbox_home(make_home())).absolute(),
        port=port,
        max_processes=most_processes,
        stop_grace_seconds=stop_grace_seconds,
        fault_plan=FaultPlan() if weather_file is None else FaultPlan.from_file(weather_file),
    )
    serve(options, lambda sandbox: on_ready(sandbox.to_json()))
