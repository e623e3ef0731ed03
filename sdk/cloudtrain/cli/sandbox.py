"""The command that runs a local AWS: sandbox."""

from __future__ import annotations

from pathlib import Path

import click

from cloudtrain import console
from cloudtrain.cli.examples import Command
from cloudtrain.cli.options import json_option


class _WithoutArguments(Command):
    """A command without arguments, which names the nearest option for a word."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Refuse a word in the place of an option."""
        if args and not args[0].startswith("-") and not ctx.resilient_parsing:
            from cloudtrain.errors import did_you_mean

            options = [name for each in self.params for name in each.opts if name.startswith("--")]
            ctx.fail(f"{self.name} has only options; {did_you_mean(f'--{args[0]}', options)}")
        return super().parse_args(ctx, args)


@click.command(
    cls=_WithoutArguments,
    examples={
        "cloudtrain sandbox": "until Ctrl-C",
        "cloudtrain sandbox --stop": "stop the one of this folder",
    },
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    metavar="N",
    help="Port; a free one by default.",
)
@click.option(
    "--home",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder of its state, by default beside the runs.",
)
@click.option(
    "--processes",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    metavar="N",
    help="Most ranks per instance.",
)
@click.option(
    "--grace",
    type=click.FloatRange(min=0),
    default=120,
    show_default=True,
    metavar="SECONDS",
    help="Time from SIGTERM to SIGKILL.",
)
@click.option(
    "--faults",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="YAML file with the faults to inject.",
)
@click.option("--stop", is_flag=True, help="Stop the sandbox and its processes.")
@json_option
def sandbox(
    port: int,
    home: Path | None,
    processes: int,
    grace: float,
    faults: Path | None,
    stop: bool,
    as_json: bool,
) -> None:
    """Run a local AWS on loopback that executes training jobs, until it is interrupted.

    The first line of standard output is one JSON object with endpoint, role, bucket and the client's environment.
    """
    from cloudtrain.backends.sandbox import sandbox_home
    from cloudtrain.backends.sandbox.fault_injection import FaultPlan
    from cloudtrain.backends.sandbox.process import stop_sandbox
    from cloudtrain.backends.sandbox.server import ServerOptions, serve
    from cloudtrain.client.home import find_home, make_home

    if stop:
        was_running = stop_sandbox(home or sandbox_home(find_home()))
        text = "the sandbox has stopped" if was_running else "no sandbox runs here"
        console.print_answer(
            lambda: {"stopped": was_running}, lambda: console.print_text(text), as_json=as_json
        )
        return
    options = ServerOptions(
        home=(home or sandbox_home(make_home())).absolute(),
        port=port,
        max_processes=processes,
        stop_grace_seconds=grace,
        fault_plan=FaultPlan() if faults is None else FaultPlan.from_file(faults),
    )
    serve(options, lambda running: console.print_json_line(running.to_json()))
