"""Options of sbatch as settings and job files give them: `--constraint=a100`."""

from __future__ import annotations

import re

_LONG = re.compile(r"--[a-z][a-z0-9-]*")
_OWN = {
    "--array": "one job is one run; for many runs write a sweep",
    "--chdir": "the job runs in the folder of its run",
    "--comment": "cloudtrain finds the run by it",
    "--error": "status and logs read the files of the run's folder",
    "--input": "the script is on standard input",
    "--job-name": "use the field name of the job",
    "--nodes": "use cluster.instances",
    "--ntasks": "use cluster.instances and cluster.processes_per_instance",
    "--ntasks-per-node": "use cluster.processes_per_instance",
    "--open-mode": "a requeued job appends to its log",
    "--output": "status and logs read the files of the run's folder",
    "--parsable": "cloudtrain reads the job's id with it",
    "--signal": "the run saves a checkpoint when it gets this signal",
    "--test-only": "use: cloudtrain check",
    "--time": "use limits.runtime, or time of the site",
    "--wait": "use: cloudtrain submit --follow",
    "--wrap": "use the section code of the job",
}
"""Options that cloudtrain gives itself, and what to use instead."""
_LONG_FORMS = {
    "-A": "--account",
    "-C": "--constraint",
    "-G": "--gpus",
    "-J": "--job-name",
    "-L": "--licenses",
    "-M": "--clusters",
    "-N": "--nodes",
    "-c": "--cpus-per-task",
    "-d": "--dependency",
    "-n": "--ntasks",
    "-p": "--partition",
    "-q": "--qos",
    "-t": "--time",
    "-w": "--nodelist",
    "-x": "--exclude",
}
_EXAMPLE = "such as --constraint=a100"


def parse_sbatch_option(text: str) -> tuple[str, str | None]:
    """Return the long name of an option and its value, which is None for a switch.

    Raises:
        ValueError: It is none, or one that cloudtrain gives itself. A hint follows after a semicolon.
    """
    name, equals, value = text.strip().partition("=")
    if not equals:
        # As on a command line: `--constraint a100`.
        name, space, value = name.partition(" ")
        equals = space
    value = value.strip()
    if not _LONG.fullmatch(name):
        raise ValueError(_not_long(text, name))
    if (own := _own_option(name)) is not None:
        raise ValueError(f"cloudtrain gives {own} itself; {_OWN[own]}")
    if not value.isprintable():
        raise ValueError(f"{name} has characters that are not allowed; write it in one line")
    if equals and not value:
        raise ValueError(f"{name} has no value; write {name}=VALUE, or {name} alone for a switch")
    return name, value if equals else None


def _own_option(name: str) -> str | None:
    """Return the option of cloudtrain that a name means; sbatch also accepts unambiguous beginnings."""
    return name if name in _OWN else next((own for own in _OWN if own.startswith(name)), None)


def _not_long(text: str, name: str) -> str:
    long = _LONG_FORMS.get(name[:2])
    if long is not None:
        return f'expected the long name of an option of sbatch, got "{text}"; write {long}=VALUE'
    if re.fullmatch(r"[a-z][a-z0-9-]*", name):
        return f'expected an option of sbatch {_EXAMPLE}, got "{text}"; did you mean "--{text}"?'
    return f'expected an option of sbatch, got "{text}"; {_EXAMPLE}'
