"""What Slurm's error messages mean, as errors of cloudtrain that say what to do."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from cloudtrain.backends.slurm.slurm_output import Partition, parse_duration
from cloudtrain.errors import (
    CloudError,
    CloudtrainError,
    UnreachableError,
    UserError,
    did_you_mean,
)
from cloudtrain.planning.batch_job import BatchJob, BatchOption
from cloudtrain.support.units import format_duration


class Legal(Protocol):
    """Lists which values are legal, as `Slurm` does."""

    def partitions(self) -> tuple[Partition, ...]:
        """Return the partitions."""
        ...

    def accounts(self) -> tuple[str, ...] | None:
        """Return the accounts that this user may charge."""
        ...

    def qualities(self) -> tuple[str, ...] | None:
        """Return the qualities of service."""
        ...

    def features(self) -> tuple[str, ...]:
        """Return the features of nodes."""
        ...

    def reservations(self) -> tuple[str, ...]:
        """Return the reservations."""
        ...

    def options(self) -> tuple[str, ...]:
        """Return the long options of sbatch."""
        ...


_MOST_CHARACTERS = 300
_PREFIX = re.compile(r"^(?:\w+: )?(?:error: |fatal: )?(?:allocation failure: )?", re.ASCII)
_UNKNOWN_OPTION = re.compile(
    r"(?:unrecognized|ambiguous) option '(--[^'=]+)|invalid option -- '(.)'"
)
_LONG_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+")


class RejectedOptionError(UserError):
    """Slurm refused an option of sbatch.

    Args:
        option: The option, or None if Slurm does not say which.
        message: What is wrong.
        hint: The nearest legal value, or what to do.
    """

    def __init__(self, option: BatchOption | None, message: str, hint: str = "") -> None:
        self.option = option
        super().__init__(message, hint)


@dataclass(frozen=True)
class _Rejection:
    """A reason for which Slurm refuses a job.

    Attributes:
        pattern: Part of Slurm's message, in small letters.
        options: The options that can be meant, the likeliest first.
        words: What is wrong.
        missing: What is wrong if the job has none of the options.
        legal: Returns the legal values.
        hint: What to do where no legal value is near.
    """

    pattern: str
    options: tuple[str, ...]
    words: str
    missing: str = ""
    legal: Callable[[Legal], Iterable[str] | None] | None = None
    hint: str = ""


# The texts of slurm_strerror, which did not change from 22.05 to 24.11. The first that matches counts.
_REJECTIONS = (
    _Rejection(
        "invalid partition",
        ("--partition",),
        "Slurm has no such partition",
        legal=lambda slurm: [each.name for each in slurm.partitions()],
    ),
    _Rejection(
        "no partition specified",
        ("--partition",),
        "Slurm has no default partition",
        missing="Slurm has no default partition, and the job names none",
        legal=lambda slurm: [each.name for each in slurm.partitions()],
    ),
    _Rejection(
        "invalid account",
        ("--account", "--partition"),
        "Slurm does not let you charge this account here",
        missing="Slurm lets you charge no account by default, and the job names none",
        legal=lambda slurm: slurm.accounts(),
        hint="ask the cluster's administrators for an account; yours: sacctmgr show associations user=$USER",
    ),
    _Rejection(
        "invalid qos",
        ("--qos",),
        "Slurm has no such QOS for your account",
        missing="your account has no default QOS, and the job names none",
        legal=lambda slurm: slurm.qualities(),
    ),
    _Rejection(
        "invalid feature",
        ("--constraint", "--prefer"),
        "no node has this feature",
        legal=lambda slurm: slurm.features(),
    ),
    _Rejection(
        "reservation",
        ("--reservation",),
        "Slurm has no such reservation, or it is not yours",
        legal=lambda slurm: slurm.reservations(),
        hint="see: scontrol show reservation",
    ),
    _Rejection(
        "time limit",
        ("--time",),
        "the time limit is longer than the partition allows",
        hint="a shorter limits.runtime, or another partition; see: sinfo --format='%P %l'",
    ),
    _Rejection(
        "generic resource",
        ("--gpus-per-node", "--gres", "--gpus"),
        "the nodes have no such GPUs",
        hint="see: sinfo --format='%P %G'",
    ),
    _Rejection(
        "memory specification",
        ("--mem", "--mem-per-cpu", "--mem-per-gpu"),
        "no node has so much memory",
        hint="see: sinfo --format='%P %m' (in MB)",
    ),
    _Rejection(
        "node count",
        ("--nodes",),
        "the partition does not have so many nodes, or does not allow so many",
        hint="fewer cluster.instances, or another partition; see: sinfo",
    ),
    _Rejection(
        "invalid node name",
        ("--nodelist", "--exclude"),
        "Slurm has no such node",
        hint="see: sinfo --Node",
    ),
    _Rejection(
        "invalid license",
        ("--licenses",),
        "Slurm has no such license",
        hint="see: scontrol show licenses",
    ),
    _Rejection(
        "more processors requested",
        ("--ntasks-per-node", "--cpus-per-task", "--nodes"),
        "the job asks for more processors than the partition allows",
    ),
    _Rejection(
        "node configuration is not available",
        ("--gpus-per-node", "--constraint", "--mem", "--nodes"),
        "no nodes of the partition have together what the job asks for",
        hint="see what they have: sinfo --format='%P %D %G %m %f'",
    ),
    _Rejection(
        "partition not available",
        ("--partition",),
        "the partition accepts no jobs now",
        missing="the default partition accepts no jobs now",
        hint="another partition (see: sinfo), or ask the cluster's administrators",
    ),
    _Rejection(
        "partition configuration not available",
        ("--partition",),
        "the partition does not allow the job now",
        hint="another partition; see: sinfo",
    ),
    _Rejection(
        "violates accounting/qos policy",
        ("--qos", "--account"),
        "the job exceeds a limit of the account or the QOS",
        missing="the job exceeds a limit of your account or its QOS",
        hint="see: sacctmgr show qos; sacctmgr show associations user=$USER",
    ),
    _Rejection(
        "not permitted to use this partition",
        ("--partition",),
        "your group may not use this partition",
        legal=lambda slurm: [each.name for each in slurm.partitions()],
    ),
)

_NOT_ANSWERING = (
    "unable to contact slurm controller",
    "connect failure",
    "connection refused",
    "unable to connect",
    "temporarily unable",
    "zero bytes were transmitted",
    "not responding",
)
_NO_CONFIGURATION = ("configuration source", "slurm.conf", "unable to process configuration")
_NOT_AUTHENTICATED = ("munge", "authentication")
_TIMEOUTS = ("socket timed out", "timed out on send/recv")
_BUSY = (
    "requested nodes are busy",
    "immediate execution impossible",
    "unable to allocate resources: requested nodes",
    "allocation timed out",
)
_UNKNOWN_JOB = (
    "invalid job id",
    "job/step already completing or completed",
    "already finished",
    "unexpected message received",
)


def is_timeout(errors: str) -> bool:
    """Return whether a command has failed because a busy controller did not answer in time."""
    return _has(errors, _TIMEOUTS)


def is_about_unknown_job(errors: str) -> bool:
    """Return whether a command has failed because Slurm does not know the job, or it has ended."""
    return _has(errors, _UNKNOWN_JOB)


def is_about_busy_nodes(errors: str) -> bool:
    """Return whether srun has found no free nodes in time."""
    return _has(errors, _BUSY)


def _has(errors: str, texts: Iterable[str]) -> bool:
    found = errors.lower()
    return any(text in found for text in texts)


def explain_failure(command: str, errors: str) -> CloudtrainError:
    """Return the error for a command of Slurm that has failed.

    Args:
        command: The command.
        errors: Its standard error.
    """
    said = _quote(errors)
    if _has(errors, _NOT_ANSWERING) or is_timeout(errors):
        return UnreachableError(
            f"{command}: Slurm's controller does not answer: {said}",
            "try again; if it lasts, ask the cluster's administrators: scontrol ping",
        )
    if _has(errors, _NO_CONFIGURATION):
        return UserError(
            f"{command}: Slurm is not configured on this machine: {said}",
            "run cloudtrain on a login node of the cluster, or set SLURM_CONF",
        )
    if _has(errors, _NOT_AUTHENTICATED):
        return CloudError(
            f"{command}: Slurm does not accept this machine: {said}",
            "on a login node, ask the cluster's administrators whether munge runs and its clock is right",
        )
    if "permission denied" in errors.lower():
        return UserError(
            f"{command}: Slurm does not let you do this: {said}", "the job may be another user's"
        )
    return CloudError(f"{command}: {said}")


def reject_options(errors: str, job: BatchJob, slurm: Legal) -> CloudtrainError:
    """Return the error for a job that sbatch has refused.

    Args:
        errors: Standard error of sbatch.
        job: The job.
        slurm: Answers which values are legal.
    """
    unknown = _UNKNOWN_OPTION.search(errors)
    if unknown is not None:
        return _reject_unknown(unknown[1] or f"-{unknown[2]}", job, slurm)
    found = errors.lower()
    for each in _REJECTIONS:
        if each.pattern in found:
            return _reject(each, errors, job, slurm)
    # Such as `invalid number of nodes (-N 0)`: sbatch names the option, or quotes its value.
    named = _named_option(errors, job)
    if named is not None:
        return RejectedOptionError(named, f"{_place(named)}: {_quote(errors)}", "see: man sbatch")
    return explain_failure("sbatch", errors)


def find_exceeded_limit(
    job: BatchJob, partitions: Sequence[Partition]
) -> RejectedOptionError | None:
    """Return the error for a job that no partition of its own allows: Slurm may accept it, and never start it.

    Args:
        job: The job.
        partitions: All partitions.
    """
    given = {each.name: each for each in job.options}
    named = given.get("--partition")
    if named is not None and named.value is not None:
        wanted = named.value.split(",")
        own = [each for each in partitions if each.name in wanted]
    else:
        own = [each for each in partitions if each.is_default]
    if not own:
        return None
    names = " or ".join(each.name for each in own)
    return _exceeded_time(given.get("--time"), own, names) or _exceeded_nodes(
        given.get("--nodes"), own, names
    )


def _exceeded_time(
    option: BatchOption | None, own: Sequence[Partition], names: str
) -> RejectedOptionError | None:
    seconds = None if option is None else parse_duration(option.value or "")
    limits = [each.max_seconds for each in own if each.max_seconds is not None]
    if option is None or seconds is None or len(limits) < len(own) or seconds <= max(limits):
        return None
    longest = format_duration(max(limits))
    return RejectedOptionError(
        option,
        f"{_place(option)}: a job in the partition {names} may take {longest}",
        f"a shorter limits.runtime; or time = '{max(limits) // 60}m' in the site's settings, so that the run is "
        "continued by further jobs",
    )


def _exceeded_nodes(
    option: BatchOption | None, own: Sequence[Partition], names: str
) -> RejectedOptionError | None:
    most = max(min(each.nodes, each.max_nodes or each.nodes) for each in own)
    value = "" if option is None else option.value or ""
    if option is None or not value.isdecimal() or int(value) <= most:
        return None
    return RejectedOptionError(
        option,
        f"{_place(option)}: a job in the partition {names} may have {most} nodes",
        "fewer cluster.instances, or another partition; see: sinfo",
    )


def _reject(rejection: _Rejection, errors: str, job: BatchJob, slurm: Legal) -> RejectedOptionError:
    option = next(
        (each for name in rejection.options for each in job.options if each.name == name), None
    )
    legal = _legal_values(rejection, slurm)
    if option is None:
        words = rejection.missing or f"{rejection.words} (Slurm: {_quote(errors)})"
        hint = rejection.hint
        if legal:
            hint = f"{rejection.options[0]}, one of: {', '.join(legal)}"
        return RejectedOptionError(None, words, hint)
    hint = rejection.hint
    if legal and option.name == rejection.options[0]:
        others = [each for each in legal if each != option.value]
        hint = did_you_mean(option.value or "", others) if others else rejection.hint
    return RejectedOptionError(option, f"{_place(option)}: {rejection.words}", hint)


def _legal_values(rejection: _Rejection, slurm: Legal) -> list[str]:
    if rejection.legal is None:
        return []
    try:
        return list(rejection.legal(slurm) or ())
    except CloudtrainError:
        # The error is about the option; that Slurm does not list the legal values is a lesser one.
        return []


def _reject_unknown(name: str, job: BatchJob, slurm: Legal) -> RejectedOptionError:
    option = next((each for each in job.options if each.name == name), None)
    hint = did_you_mean(name, slurm.options(), "see: sbatch --help")
    place = name if option is None else _place(option)
    return RejectedOptionError(option, f"{place}: sbatch has no such option", hint)


def _named_option(errors: str, job: BatchJob) -> BatchOption | None:
    names = _LONG_OPTION.findall(errors)
    found = [each for each in job.options if each.name in names]
    return found[0] if found else None


def _place(option: BatchOption) -> str:
    """Return an option with the place that gives it, such as `cloudtrain.toml:3: --partition=gpu`."""
    return f"{option.origin}: {option}" if option.origin else str(option)


def _quote(errors: str) -> str:
    """Return the last lines of Slurm's errors in one line, without the command's name."""
    lines = [_PREFIX.sub("", line.strip()) for line in errors.splitlines()]
    said = "; ".join(dict.fromkeys(line for line in lines if line))
    text = "".join(char if char.isprintable() else " " for char in said)
    if len(text) > _MOST_CHARACTERS:
        text = f"{text[:_MOST_CHARACTERS]}..."
    return text or "no message"
