"""Options that newcomers give under the name that another tool has for them."""

from __future__ import annotations

from collections.abc import Mapping

import click

from cloudtrain.errors import nearest

_CLOSE = 0.75
"""Similarity of a misspelt option, without its dashes."""
_JOBS = ("check", "files", "plan", "rehearse", "submit", "validate")

_SAME: Mapping[str, tuple[str, ...]] = {
    "a": ("--all", "-n"),
    "all": ("-n",),
    "background": ("--detach",),
    "d": ("--detach",),
    "dest": ("--to", "--output"),
    "dir": ("--to",),
    "dry-run": ("--plan",),
    "dryrun": ("--plan",),
    "f": ("--follow", "--yes", "--force"),
    "force": ("--yes",),
    "format": ("--json",),
    "instance-count": ("--instances",),
    "j": ("--json",),
    "last": ("--tail", "-n"),
    "limit": ("-n",),
    "lines": ("--tail",),
    "max": ("-n",),
    "n": ("--instances", "--tail"),
    "nnodes": ("--instances",),
    "no-follow": ("--detach",),
    "no-wait": ("--detach",),
    "nodes": ("--instances",),
    "num-nodes": ("--instances",),
    "o": ("--to", "--json"),
    "output": ("--to", "--json"),
    "stream": ("--follow",),
    "tail": ("--follow",),
    "unattended": ("--yes",),
    "w": ("--follow",),
    "wait": ("--follow",),
    "watch": ("--follow",),
    "y": ("--yes", "--force"),
    "yes": ("--yes", "--force"),
}
"""Options of other tools, by name without dashes, and those of cloudtrain; the first that the command has is meant."""

_FIELDS: Mapping[str, str] = {
    "J": "name=NAME",
    "N": "cluster.instances=N",
    "e": "code.env.NAME=VALUE",
    "env": "code.env.NAME=VALUE",
    "gpus": "cluster.instance_type=TYPE",
    "gres": "cluster.instance_type=TYPE",
    "instance": "cluster.instance_type=TYPE",
    "instance-type": "cluster.instance_type=TYPE",
    "job-name": "name=NAME",
    "name": "name=NAME",
    "spot": "cluster.spot=true",
    "t": "limits.runtime=2h",
    "tag": "tags.NAME=VALUE",
    "tags": "tags.NAME=VALUE",
    "time": "limits.runtime=2h",
    "use-spot": "cluster.spot=true",
}
"""Options of other tools for what `--set` changes."""

_PLAN = {
    "submit": "plan JOB",
    "rehearse": "plan JOB",
    "check": "plan JOB",
    "run": "sweep plan FILE",
}
_FOLLOW = {"status": "follow RUN"}
_COMMANDS: Mapping[str, Mapping[str, str]] = {
    "backend": {"resume": "submit JOB --backend NAME --set checkpoint.resume=RUN"},
    "dry-run": _PLAN,
    "dryrun": _PLAN,
    "f": _FOLLOW,
    "follow": _FOLLOW,
    "w": _FOLLOW,
    "watch": _FOLLOW,
}
"""Options that are a command of their own: by the command to which they are given, the one that is meant."""

_NOT_NEEDED = (
    "background",
    "d",
    "detach",
    "no-follow",
    "no-wait",
    "q",
    "quiet",
    "v",
    "verbose",
    "y",
    "yes",
)
_FILES = ("c", "config", "f", "file", "job", "job-file", "spec")
_RUNS = ("id", "job", "last", "latest", "run", "run-id")
_SETTINGS = ("bucket", "region", "role")
_VERSION = ("v", "V")


def explain_option(error: click.NoSuchOption) -> click.UsageError:
    """Return the error of an option that a command lacks, with what to write in its place."""
    message = f"no such option {error.option_name}"
    hint = ""
    if error.ctx is not None:
        hint = _hint(error.option_name.lstrip("-"), error.ctx)
    if hint:
        message = f"{message}; {hint}"
    return click.UsageError(message, error.ctx)


def _hint(name: str, ctx: click.Context) -> str:
    options = _options(ctx.command)
    if ctx.parent is None:
        return _hint_before_command(name, options)
    command = _COMMANDS.get(name, {}).get(str(ctx.command.name))
    if command is not None:
        return f'did you mean "cloudtrain {command}"?'
    hints = (
        _argument(name, ctx),
        _same(name, options),
        _near(name, options),
        "leave it out" if name in _NOT_NEEDED else "",
        _field(name) if ctx.command.name in _JOBS else "",
    )
    return next(filter(None, hints), f"see {ctx.command_path} --help")


def _hint_before_command(name: str, options: Mapping[str, str]) -> str:
    if name in _VERSION:
        return 'did you mean "--version"?'
    if name == "json":
        return "write it behind the command"
    return _near(name, options) or "see cloudtrain --help"


def _same(name: str, options: Mapping[str, str]) -> str:
    """Return a hint with the option that does what another tool's does; an empty string if there is none."""
    found = [each for each in _SAME.get(name.replace("_", "-"), ()) if each in options]
    return f'did you mean "{found[0]}"?' if found else ""


def _argument(name: str, ctx: click.Context) -> str:
    """Return a hint for an option that stands for the command's argument; an empty string for another one."""
    arguments = [each.name for each in ctx.command.params if isinstance(each, click.Argument)]
    if "job" in arguments and name in _FILES:
        return f"the job file is an argument: {ctx.command_path} JOB"
    is_of_run = "run" in arguments or "runs" in arguments
    if is_of_run and name in _RUNS and not _same(name, _options(ctx.command)):
        run = "latest" if name in ("last", "latest") else "RUN"
        return f"the run is an argument: {ctx.command_path} {run}"
    return ""


def _near(name: str, options: Mapping[str, str]) -> str:
    """Return a hint with the option of almost the same name, or whose beginning the name is."""
    long = {each.removeprefix("--"): each for each in options if each.startswith("--")}
    found = nearest(name, long, cutoff=_CLOSE) if len(name) > 1 else None
    return f'did you mean "{long[found]}"?' if found else ""


def _field(name: str) -> str:
    """Return the words that set the field of a job that an option means, or else pass it to the script."""
    from cloudtrain.job.diagnostics import place_of_word
    from cloudtrain.job.spec import JobSpec

    if name in _SETTINGS:
        return f"it is a setting of the account: CLOUDTRAIN_{name.upper()}"
    if name in _FIELDS:
        return f"a job's fields are set by --set: --set {_FIELDS[name]}"
    if len(name) == 1:
        return ""
    place = place_of_word(JobSpec, name)
    if place and not place.startswith("train."):
        return f"a job's fields are set by --set: --set {place}=VALUE"
    script = f"--set code.args.{name}=VALUE"
    if place:
        return f"did you mean --set {place}=VALUE (of a Task), or {script} (of a script)?"
    return f"to pass it to the script: {script}"


def _options(command: click.Command) -> dict[str, str]:
    """Return the options of a command, by name and in the order of its help."""
    return {
        name: name
        for each in command.params
        if isinstance(each, click.Option) and not each.hidden
        for name in [*each.opts, *each.secondary_opts]
    }
