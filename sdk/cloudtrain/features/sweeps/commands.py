"""Commands about sweeps: plan, run, status, follow, stop, best and show."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from cloudtrain import console
from cloudtrain.cli.examples import Group
from cloudtrain.cli.options import account_options, backend_options, json_option, refuse_misspelt
from cloudtrain.support.backend_facts import backend_option

if TYPE_CHECKING:
    from cloudtrain.features.sweeps.trial import Trial

_RUN, _PLAN = "run", "plan"


class _DefaultRunGroup(Group):
    """A command group in which `sweep FILE` means `sweep run FILE`, and `sweep --plan FILE` `sweep plan FILE`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Insert `run` or `plan` where no command is named."""
        asks_for_help = not args or args[0] in ctx.help_option_names
        if not asks_for_help and args[0] not in self.commands:
            refuse_misspelt(ctx, args[0], self.commands)
            command = _PLAN if "--plan" in args else _RUN
            args = [command, *(word for word in args if word != "--plan")]
        return super().parse_args(ctx, args)


def _complete_sweeps(
    _: click.Context, __: click.Parameter | None, incomplete: str
) -> list[CompletionItem]:
    """Return the ids of this machine's sweeps that begin with a text, the newest first."""
    from cloudtrain.features.sweeps.stored_sweep import known_sweeps

    return [
        CompletionItem(name) for name in ("latest", *known_sweeps()) if name.startswith(incomplete)
    ]


_file_argument = click.argument("file", type=click.Path(path_type=str), default="sweep.yaml")
_sweep_argument = click.argument("name", metavar="SWEEP", shell_complete=_complete_sweeps)
_read_sweep_argument = click.argument(
    "name", metavar="[SWEEP]", default="latest", shell_complete=_complete_sweeps
)


@click.group(
    cls=_DefaultRunGroup,
    name="sweep",
    examples={
        "cloudtrain sweep plan": "its trials, price and limit",
        "cloudtrain sweep run --local --follow": "run it on this machine",
        "cloudtrain sweep best --write best.yaml": "keep the best job",
    },
)
def sweep() -> None:
    """Search the fields of a job for the best value of a metric, within a budget.

    FILE is a sweep file, by default ./sweep.yaml. SWEEP is an id, the beginning or end of one, a sweep's name, or
    latest.

    `sweep FILE` is short for `sweep run FILE`, and `sweep --plan FILE` for `sweep plan FILE`.
    """


@sweep.command(
    name=_PLAN,
    examples={
        "cloudtrain sweep plan": "the sweep.yaml of this folder",
        "cloudtrain sweep plan rates.yaml --local": "for this machine",
    },
)
@_file_argument
@account_options
@backend_options("Plan for this machine instead of SageMaker.", "Plan for the sandbox.")
@json_option
def plan_(file: str, flags: dict[str, str | None], backend: str, as_json: bool) -> None:
    """Show space, number of trials, price per trial and highest cost. Offline; needs no credentials."""
    from cloudtrain.client.account import find_settings
    from cloudtrain.features.sweeps import service
    from cloudtrain.features.sweeps.loader import load_sweep
    from cloudtrain.features.sweeps.output import print_sweep_plan

    with console.spinner("planning every bound, every choice and samples"):
        loaded = load_sweep(file)
        planned = service.plan(loaded, backend=backend, settings=find_settings(file, flags))
    console.print_answer(
        planned.to_json, lambda: print_sweep_plan(planned, backend), as_json=as_json
    )


@sweep.command(
    name=_RUN,
    examples={
        "cloudtrain sweep run --local --follow": "run ./sweep.yaml here",
        "cloudtrain sweep run rates.yaml": "run it on SageMaker",
    },
)
@_file_argument
@account_options
@backend_options("Run the trials on this machine.", "Run the trials in the sandbox.")
@click.option("--new", is_flag=True, help="Start even if the same sweep is unfinished.")
@click.option(
    "--follow/--detach",
    default=False,
    help="Show the sweep until it ends, or return at once.",
)
@json_option
def run_(
    file: str, flags: dict[str, str | None], backend: str, new: bool, follow: bool, as_json: bool
) -> int:
    """Start a sweep, or continue an unfinished one of the same content. It continues when this command ends."""
    from cloudtrain.client.account import find_settings
    from cloudtrain.console.waiting import waiting
    from cloudtrain.features.sweeps import output as shown
    from cloudtrain.features.sweeps import service
    from cloudtrain.features.sweeps.handle import Sweep
    from cloudtrain.features.sweeps.loader import load_sweep

    with waiting("reading the sweep") as wait:
        loaded = load_sweep(file)
        settings = find_settings(file, flags)
        wait.begin("planning every bound, every choice and samples", is_long=True)
        stored, planned = service.open_sweep(loaded, backend=backend, settings=settings, new=new)
        given = {
            f"CLOUDTRAIN_{name.upper()}": value
            for name, value in flags.items()
            if value is not None
        }
        wait.begin("starting the sweep")
        service.start(stored, given, settings=settings, new=new)
    found = Sweep(stored)
    if planned is not None:
        shown.print_plan_warnings(planned)
    shown.print_started(found, is_new=planned is not None)
    if planned is None and service.engine_of_stored(stored).has_other_code(stored):
        shown.print_changed_code(stored, file)
    if follow:
        return shown.follow_sweep(found, as_json=as_json)
    console.print_answer(
        lambda: found.status().to_json(), lambda: console.print_text(found.id), as_json=as_json
    )
    return 0


@sweep.command(
    examples={
        "cloudtrain sweep status": "the newest sweep",
        "cloudtrain sweep status rates --json": "by its name, for a script",
    },
)
@_read_sweep_argument
@json_option
def status(name: str, as_json: bool) -> None:
    """Show the state of a sweep, its budget, and the ranking of its trials."""
    from cloudtrain.features.sweeps.handle import get_sweep
    from cloudtrain.features.sweeps.output import print_sweep

    found = get_sweep(name).status()
    console.print_answer(found.to_json, lambda: print_sweep(found), as_json=as_json)


@sweep.command(
    examples={
        "cloudtrain sweep follow": "the newest sweep",
        "cloudtrain sweep follow rates": "by its name",
    },
)
@_read_sweep_argument
@json_option
def follow(name: str, as_json: bool) -> int:
    """Show the ranking of a sweep until it ends. Ctrl-C leaves the sweep running."""
    from cloudtrain.features.sweeps.handle import get_sweep
    from cloudtrain.features.sweeps.output import follow_sweep

    return follow_sweep(get_sweep(name), as_json=as_json)


@sweep.command(
    examples={
        "cloudtrain sweep stop latest": "the newest sweep",
        "cloudtrain sweep stop rates": "by its name",
    },
)
@_sweep_argument
@json_option
def stop(name: str, as_json: bool) -> None:
    """Stop a sweep and its active runs, and wait for their end."""
    from cloudtrain.features.sweeps.handle import get_sweep
    from cloudtrain.features.sweeps.output import print_sweep

    found = get_sweep(name)
    with console.spinner("waiting for the end of the active runs"):
        found.stop()
        ended = found.wait()
    console.print_answer(ended.to_json, lambda: print_sweep(ended), as_json=as_json)


@sweep.command(
    examples={
        "cloudtrain sweep best": "of the newest sweep",
        "cloudtrain sweep best rates --write best.yaml": "keep its job",
    },
)
@_read_sweep_argument
@click.option("--write", metavar="FILE", help="Write its job into a new file, with comments.")
@json_option
def best(name: str, write: str | None, as_json: bool) -> None:
    """Show the best trial of a sweep; with --write, write its job into a file."""
    from cloudtrain.features.sweeps.handle import get_sweep

    found = get_sweep(name)
    _show_trial(found.id, found.best if write is None else found.write_job(write), as_json=as_json)
    if write is not None:
        command = f"cloudtrain submit {write}{backend_option(found.backend)}"
        console.print_message(f"wrote {write}; to run it: {command}")


@sweep.command(
    examples={
        "cloudtrain sweep show latest 3": "trial 3 of the newest sweep",
        "cloudtrain sweep show rates 0 --json": "by its name, for a script",
    },
)
@_sweep_argument
@click.argument("trial", type=click.IntRange(min=0), metavar="TRIAL")
@json_option
def show(name: str, trial: int, as_json: bool) -> None:
    """Show one trial of a sweep: its values, its runs and its result."""
    from cloudtrain.features.sweeps.handle import get_sweep

    found = get_sweep(name)
    _show_trial(found.id, found.trial(trial), as_json=as_json)


def _show_trial(sweep_id: str, trial: Trial, *, as_json: bool) -> None:
    from cloudtrain.features.sweeps.output import print_trial
    from cloudtrain.features.sweeps.results import trial_json

    content = {"sweep": sweep_id, **trial_json(trial)}
    console.print_answer(lambda: content, lambda: print_trial(sweep_id, trial), as_json=as_json)
