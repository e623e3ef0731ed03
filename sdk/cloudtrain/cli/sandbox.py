"""The command that runs a local AWS: sandbox."""

from __future__ import annotations

from pathlib import Path

import click

from cloudtrain import console
from cloudtrain.cli.options import json_option


@click.command()
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port on loopback (default: a free one).")
@click.option(
    "--home", type=click.Path(path_type=Path), help="Folder of its state (default: `sandbox` in the folder of runs)."
)
@click.option(
    "--processes",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    help="Maximum number of ranks per instance.",
)
@click.option(
    "--grace",
    type=click.FloatRange(min=0),
    default=120,
    show_default=True,
    help="Seconds between SIGTERM and SIGKILL.",
)
@click.option("--weather", type=click.Path(path_type=Path), help="YAML file that lists the faults to inject.")
@click.option("--stop", is_flag=True, help="Stop the sandbox of this folder and every process it has started.")
@json_option
def sandbox(
    port: int, home: Path | None, processes: int, grace: float, weather: Path | None, stop: bool, as_json: bool
) -> int:
    """Run a local AWS on loopback that executes training jobs, until it is interrupted.

    The first line of standard output is one JSON object with endpoint, role, bucket and the client's environment.
    """
    from cloudtrain.client.sandbox import serve_sandbox, stop_sandbox

    if stop:
        was_running = stop_sandbox(home)
        if as_json:
            console.print_json({"stopped": was_running})
        else:
            console.print_text("the sandbox has stopped" if was_running else "no sandbox runs here")
        return 0
    serve_sandbox(
        home=home,
        port=port,
        most_processes=processes,
        stop_grace_seconds=grace,
        weather_file=weather,
        on_ready=console.print_json_line,
    )
    return 0
