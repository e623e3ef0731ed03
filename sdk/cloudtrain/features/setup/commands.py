"""Commands that set up a job, the account's settings and this machine: init, configure and doctor."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cloudtrain import console
from cloudtrain.cli.examples import Command
from cloudtrain.cli.options import account_options, decline, json_option
from cloudtrain.console.facts import print_sentence
from cloudtrain.errors import EXIT_USER, CloudError, UserError
from cloudtrain.features.setup.new_job import TEMPLATES, create_job, lacks_packages
from cloudtrain.support.installation import MODULES_OF_LOCAL_RUNS, install_command, torch_note

if TYPE_CHECKING:
    from cloudtrain.preflight import Candidates
    from cloudtrain.settings.profiles import ProfileChange
    from cloudtrain.support.checks import Check


@click.command(
    cls=Command,
    examples={
        "cloudtrain init my-job": "asks on a terminal which template",
        "cloudtrain init my-job --template task": "a model, data and a loss",
        "cloudtrain init my-job --template script": "a training loop of your own",
    },
)
@click.argument("folder", metavar="[DIR]", type=click.Path(path_type=Path), default=".")
@click.option(
    "--template",
    type=click.Choice(TEMPLATES),
    help="Kind of job. A terminal asks for it; else task.",
)
@json_option
def init(folder: Path, template: str | None, as_json: bool) -> None:
    """Write a new job into DIR, by default the working folder: job.yaml, code, README, ignore file and schema.

    It prints the commands that check the job, plan it and run it here, with --install where this machine lacks its
    packages. Existing files are never changed.

    \b
    task         model, data and loss; cloudtrain trains it
    script       a training loop of its own under torchrun
    lightning    a script with Lightning's Trainer
    accelerate   a script with a loop of Accelerate
    huggingface  a script with a Trainer of Transformers
    """  # noqa: D301 (click's mark for lines that stay as they are)
    if template is None and sys.stdin.isatty() and not as_json:
        template = click.prompt(
            "template", type=click.Choice(TEMPLATES), default=TEMPLATES[0], err=True
        )
    template = template or TEMPLATES[0]
    files = create_job(folder, template)
    content = {"folder": str(folder), "template": template, "files": files}
    console.print_answer(lambda: content, lambda: _print_files(folder, files), as_json=as_json)


def _print_files(folder: Path, files: list[str]) -> None:
    """Print what was created and the next commands; on a terminal in lines for people, in a pipe one file a line."""
    from cloudtrain.features.setup.output import print_new_job

    print_new_job(folder, files, needs_install=lacks_packages(folder, files))
    if not all(map(importlib.util.find_spec, MODULES_OF_LOCAL_RUNS)):
        console.print_message(
            f"local runs need packages that are missing: {install_command('local')}"
        )
        if note := torch_note():
            console.print_message(note)


_NONE = "-"
_REGION_QUESTION = "AWS region"
_SUBNETS_QUESTION = "subnets, with commas; empty: SageMaker's own network"


@click.command(
    cls=Command,
    examples={
        "cloudtrain configure --from-terraform infra/": "the outputs of Terraform",
        "cloudtrain configure --set bucket=my-bucket": "one setting",
        "cloudtrain configure --show": "each setting and its source",
    },
)
@click.option(
    "--from-terraform",
    "terraform",
    metavar="PATH",
    help="Store the outputs of a folder, JSON file or -.",
)
@click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="NAME=VALUE",
    help="Store one setting; an empty value removes it.",
)
@account_options
@click.option("--yes", is_flag=True, help="Replace stored values without asking.")
@click.option("--offline", is_flag=True, help="Do not check the values against the account.")
@click.option("--show", is_flag=True, help="Show each setting and its source.")
@click.option(
    "--job",
    type=click.Path(path_type=Path),
    metavar="JOB",
    help="With --show: settings for this job.",
)
@click.option("--list", "list_", is_flag=True, help="List the stored profiles.")
@click.option("--remove", metavar="NAME", help="Remove a profile.")
@json_option
def configure(
    terraform: str | None,
    assignments: tuple[str, ...],
    flags: dict[str, str | None],
    yes: bool,
    offline: bool,
    show: bool,
    job: Path | None,
    list_: bool,
    remove: str | None,
    as_json: bool,
) -> None:
    """Store the account's settings for every later command, or show their sources.

    Without --from-terraform and --set the command asks for each setting, and lists the account's roles and buckets.
    --profile stores the settings under a name. Values are checked; secrets are rejected.
    """
    modes = {"--show": show, "--list": list_, "--remove": remove is not None}
    named = [name for name, is_given in modes.items() if is_given]
    if len(named) > 1 or (named and (terraform is not None or assignments)):
        raise click.UsageError(
            f"{named[0]} cannot be combined with another of --show, --list, --remove, --from-terraform and --set"
        )
    if show:
        _show(job, flags, as_json=as_json)
    elif list_:
        _list(as_json=as_json)
    elif remove is not None:
        _remove(remove, as_json=as_json)
    else:
        values = _given(terraform, assignments, flags)
        is_interactive = not values
        if is_interactive:
            values = _ask()
            # Without any answer there is nothing to check.
            offline = offline or not values
        _store(values, is_interactive=is_interactive, yes=yes, offline=offline, as_json=as_json)


def _show(job: Path | None, flags: Mapping[str, str | None], *, as_json: bool) -> None:
    from cloudtrain.client.account import find_settings, trace_settings
    from cloudtrain.features.setup import output as shown

    trace = (trace_settings(job, flags), find_settings(job, flags), _profile())
    console.print_answer(
        lambda: shown.trace_to_json(*trace), lambda: shown.print_trace(*trace), as_json=as_json
    )


def _list(*, as_json: bool) -> None:
    from cloudtrain.features.setup import output as shown
    from cloudtrain.features.setup.account_settings import list_profiles

    profiles, chosen = list_profiles(), _profile()
    found = [
        {"profile": name, "settings": each, "chosen": name == chosen}
        for name, each in profiles.items()
    ]
    console.print_answer(
        lambda: {"profiles": found}, lambda: shown.print_profiles(profiles, chosen), as_json=as_json
    )


def _remove(name: str, *, as_json: bool) -> None:
    from cloudtrain.features.setup.account_settings import remove_profile

    remove_profile(name)
    content = {"profile": name, "removed": True}
    console.print_answer(
        lambda: content, lambda: console.print_text(f"profile {name} is removed"), as_json=as_json
    )


def _profile() -> str | None:
    return os.environ.get("CLOUDTRAIN_PROFILE") or None


def _given(
    terraform: str | None, assignments: tuple[str, ...], flags: Mapping[str, str | None]
) -> dict[str, Any]:
    """Return the settings from the command line; empty when none is given.

    --set takes precedence over --role, --bucket and --region, and these over Terraform's outputs.
    """
    from cloudtrain.features.setup.account_settings import read_terraform
    from cloudtrain.settings.profiles import parse_assignment

    assigned = dict(map(parse_assignment, assignments))
    outputs = read_terraform(terraform) if terraform is not None else {}
    return {
        **outputs,
        **{name: value for name, value in flags.items() if value is not None},
        **assigned,
    }


def _store(
    values: Mapping[str, Any], *, is_interactive: bool, yes: bool, offline: bool, as_json: bool
) -> None:
    from cloudtrain.features.setup import account_settings as account
    from cloudtrain.features.setup import output as shown

    checks: list[Check] = []

    def confirm(change: ProfileChange) -> None:
        waiting.close()
        shown.print_unknown_checks(checks)
        if change.changes:
            shown.print_changes(change)
            _confirm(change, is_interactive=is_interactive, yes=yes)

    with _report_abort(), ExitStack() as waiting:
        if not offline:
            waiting.enter_context(console.spinner("checking the account"))
        change = account.configure(
            values, profile=_profile(), offline=offline, on_checks=checks.extend, confirm=confirm
        )
    content = {**change.to_json(), "checks": [check.to_json() for check in checks]}
    console.print_answer(lambda: content, lambda: shown.print_stored(change), as_json=as_json)


def _confirm(change: ProfileChange, *, is_interactive: bool, yes: bool) -> None:
    if yes or not (is_interactive or change.overwrites):
        return
    names = ", ".join(each.name for each in change.overwrites)
    if not sys.stdin.isatty():
        raise UserError(
            f"{change.file} has other values of {names}; nothing was stored",
            "to replace them: --yes",
        )
    question = f"replace {names}?" if names else "store this?"
    if not click.confirm(question, default=not names, err=True):
        decline("nothing was stored")


@contextmanager
def _report_abort() -> Iterator[None]:
    try:
        yield
    except (click.Abort, KeyboardInterrupt):
        console.print_message("\nnothing was stored")
        raise


def _ask() -> dict[str, Any]:
    """Ask for each setting on the terminal; list the account's candidates for it. Skipped settings are left out."""
    if not sys.stdin.isatty():
        raise UserError(
            "standard input is not a terminal, so no setting can be asked for",
            "use options: --from-terraform infra/, or --set role=ARN --set bucket=NAME --set region=NAME",
        )
    from cloudtrain.features.setup.account_settings import default_region, list_profiles

    profiles = list_profiles()
    known = {**profiles.get(None, {}), **profiles.get(_profile(), {})}
    with _report_abort():
        console.print_message("Settings for SageMaker. Local runs and the sandbox need none.")
        console.print_message(
            "Enter skips a question or keeps the value in brackets. Ctrl-C stores nothing."
        )
        before = known.get("region") or default_region()
        question = _REGION_QUESTION if before else f"{_REGION_QUESTION}, such as us-west-2"
        region = _ask_for("region", question, before, None, may_skip=True)
        found = _find(region) if region else {}
        role = _choose("role", "execution role", found.get("role"), known.get("role"), region)
        bucket = _choose("bucket", "bucket", found.get("bucket"), known.get("bucket"), region)
        given = {"region": region, "role": role, "bucket": bucket}
        values = {name: value for name, value in given.items() if value}
        if not values:
            return {}
        prefix = known.get("prefix", "cloudtrain")
        values["prefix"] = _ask_for("prefix", "prefix of everything in the bucket", prefix, None)
        values |= _ask_for_network(known)
        buckets = found["bucket"].found if "bucket" in found else ()
        key = known.get("kms_key") or next(
            (each.kms_key for each in buckets if each.value == bucket), None
        )
        values["kms_key"] = _ask_for(
            "kms_key", "KMS key of volumes and outputs", key, region or None, optional=True
        )
    return values


def _find(region: str) -> dict[str, Candidates]:
    """Return the account's candidates for each setting; none without credentials."""
    from cloudtrain.features.setup.account_settings import find_candidates

    try:
        with console.spinner("looking for roles and buckets"):
            return find_candidates(region)
    except CloudError as error:
        print_sentence(f"cannot list roles and buckets: {error.message}", console.print_message)
        return {}


def _choose(name: str, what: str, found: Candidates | None, before: Any, region: str) -> str:
    """Ask for one of the account's roles or buckets, by number or by name."""
    from cloudtrain.features.setup import output as shown

    if found is not None:
        shown.print_candidates(what, found)
    if not before and not (found is not None and found.fitting):
        shown.print_help_for(name)
    fitting = found.fitting if found is not None else ()
    default = before or (fitting[0].value if len(fitting) == 1 else None)
    numbered = {str(index): each.value for index, each in enumerate(fitting, start=1)}
    return _ask_for(
        name,
        f"{what}{' (number or name)' if fitting else ''}",
        default,
        region or None,
        numbered,
        may_skip=True,
    )


def _ask_for_network(known: Mapping[str, Any]) -> dict[str, str]:
    subnets = _ask_for(
        "subnets", _SUBNETS_QUESTION, ",".join(known.get("subnets", ())), None, optional=True
    )
    if not subnets:
        return {"subnets": "", "security_groups": ""}
    before = ",".join(known.get("security_groups", ())) or None
    return {
        "subnets": subnets,
        "security_groups": _ask_for("security_groups", "security groups", before, None),
    }


def _ask_for(
    name: str,
    question: str,
    default: Any,
    region: str | None,
    numbered: Mapping[str, str] | None = None,
    *,
    optional: bool = False,
    may_skip: bool = False,
) -> str:
    """Ask until the value is valid for the setting.

    Args:
        name: The setting.
        question: The question, in a few words.
        default: What Enter means; None or empty without a value.
        region: The region that values must fit, or None.
        numbered: Values by the numbers that were shown.
        optional: The setting may have no value, which `-` means where there is a default.
        may_skip: Enter without a default returns an empty text: the setting is left as it is.
    """
    from cloudtrain.settings.settings import parse_value
    from cloudtrain.settings.values import find_value_error

    if optional and default:
        question += f" ({_NONE}: none)"

    def read(text: str) -> str:
        value = (numbered or {}).get(text.strip(), text.strip())
        if optional and value in ("", _NONE):
            return ""
        if may_skip and not value:
            return ""
        wrong = find_value_error(name, parse_value(name, value), region)
        if wrong is not None:
            raise click.UsageError("; ".join(wrong))
        return value

    answer: str = click.prompt(
        question,
        default=default or ("" if optional or may_skip else None),
        show_default=bool(default),
        value_proc=read,
        err=True,
    )
    return answer


@click.command(
    cls=Command,
    examples={
        "cloudtrain doctor": "what works here, and what is missing",
        "cloudtrain doctor --json": "for a script",
    },
)
@json_option
def doctor(as_json: bool) -> int:
    """Check this machine: Python, torch, GPUs, disk space, and what is configured for SageMaker and Slurm.

    Exits 0 if local runs are possible, else 2. What only SageMaker or Slurm needs is a note. No network call is made,
    except to the controllers of the settings' Slurm sites; `cloudtrain check` asks the account or the cluster's nodes.
    """
    from cloudtrain.features.setup.machine_report import check_machine, is_ready, report_to_json
    from cloudtrain.features.setup.output import print_machine_checks

    with console.spinner("checking this machine"):
        checks = check_machine()
    ready = is_ready(checks)
    show = functools.partial(print_machine_checks, checks, is_ready=ready)
    console.print_answer(lambda: report_to_json(checks), show, as_json=as_json)
    return 0 if ready else EXIT_USER
