"""Readers of what Slurm's commands print. Their text is equal from Slurm 22.05 to 24.11; their JSON is not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

RECORD = "\x1e"
FIELD = "\x1f"
"""They separate jobs and their fields in the output of squeue: names and comments may contain any printable text."""

QUEUE_FORMAT = RECORD + FIELD.join(("%A", "%T", "%r", "%S", "%N", "%j", "%k")) + FIELD
HISTORY_FIELDS = ("JobIDRaw", "State", "ExitCode", "End", "NodeList", "JobName", "Comment")

_NONE = frozenset({"", "(null)", "N/A", "None", "Unknown", "NONE", "None assigned"})
# Their value is the rest of the line, whatever it contains.
_REST_OF_LINE = (
    "JobName",
    "Comment",
    "AdminComment",
    "SystemComment",
    "Command",
    "WorkDir",
    "StdErr",
    "StdIn",
    "StdOut",
    "SubmitLine",
)
_KIND = ("Partitions", "AvailableFeatures", "Gres", "CPUTot")
_ACTIVE = frozenset({"PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "STOPPED", "COMPLETING"})
_FIRST_LINE = re.compile(r"JobId=(\d+)(?: .*?)? JobName=(.*)")
_DURATION = re.compile(r"(?:(\d{1,9})-)?(\d{1,9})(?::(\d{1,9}))?(?::(\d{1,9}))?", re.ASCII)
# A longer one is none of Slurm's.
_NUMBER = re.compile(r"\d{1,18}", re.ASCII)
_CANCELLED_BY = re.compile(r"CANCELLED by (\d+)")
_START = re.compile(r"to start at (\S+)")


@dataclass(frozen=True)
class SlurmJob:
    """A job as squeue, scontrol or sacct describes it.

    Attributes:
        id: Slurm's id.
        name: Its name, which is a run id.
        comment: Its comment.
        state: Its state, such as PENDING.
        flags: What Slurm adds to the state, such as COMPLETING.
        reason: Slurm's word for why it waits or has ended, such as `Resources`; empty if there is none.
        start: When it started, or when Slurm expects the start; None if unknown.
        ended: When it ended; None before, and from squeue.
        nodes: Its nodes in Slurm's notation, such as `n[1-2]`; empty as long as it waits.
        restarts: How often it was requeued; None from squeue and sacct, which do not say so.
        exit_status: Exit status of the batch script; None from squeue.
        exit_signal: The signal that ended the batch script, or 0; None from squeue.
        cancelled_by: User id of who cancelled it; only sacct says so.
        ends_by: When its time limit ends it, as long as it is active; only scontrol says so.
        excluded: Nodes that it must not get, in Slurm's notation; only scontrol says so.
    """

    id: str
    name: str
    comment: str
    state: str
    flags: frozenset[str] = frozenset()
    reason: str = ""
    start: datetime | None = None
    ended: datetime | None = None
    nodes: str = ""
    restarts: int | None = None
    exit_status: int | None = None
    exit_signal: int | None = None
    cancelled_by: int | None = None
    ends_by: datetime | None = None
    excluded: str = ""


@dataclass(frozen=True)
class Partition:
    """A partition.

    Attributes:
        name: Its name.
        is_default: Whether a job without a partition goes there.
        is_up: Whether it starts jobs.
        max_seconds: Longest time of a job, or None for no limit.
        default_seconds: Time of a job that asks for none, or None for the longest one.
        max_nodes: Most nodes of a job, or None for no limit.
        nodes: Number of its nodes.
        accounts: Accounts that may use it; empty for all.
    """

    name: str
    is_default: bool
    is_up: bool
    max_seconds: int | None
    default_seconds: int | None
    max_nodes: int | None
    nodes: int
    accounts: tuple[str, ...]


@dataclass(frozen=True)
class Node:
    """A node.

    Attributes:
        name: Its name.
        address: Its address, which may be a name.
        state: Its state, such as IDLE or DOWN.
        is_silent: Whether it does not answer the controller.
        flags: What Slurm adds to the state, such as DRAIN.
        kind: What jobs can ask of it: its partitions, features and resources, as text.
    """

    name: str
    address: str
    state: str
    is_silent: bool
    flags: frozenset[str]
    kind: str = ""

    @property
    def is_down(self) -> bool:
        """Whether Slurm regards it as lost."""
        return self.state in {"DOWN", "FAIL", "ERROR"} or "DOWN" in self.flags

    @property
    def is_in_service(self) -> bool:
        """Whether jobs start on it, now or when it is free."""
        is_drained = bool(self.flags & {"DRAIN", "MAINT"})
        return not (self.is_down or self.is_silent or is_drained or self.state == "UNKNOWN")


def parse_queue(text: str) -> tuple[SlurmJob, ...]:
    """Return the jobs that squeue has printed in `QUEUE_FORMAT`. Incomplete ones are left out."""
    jobs = []
    for record in text.split(RECORD)[1:]:
        # Behind the last field comes the end of the line.
        parts = record.split(FIELD)
        if len(parts) != QUEUE_FORMAT.count(FIELD) + 1 or not parts[0].isdecimal():
            continue
        job, state, reason, start, nodes, name, comment, _ = parts
        word, flags = _split_state(state)
        jobs.append(
            SlurmJob(
                id=job,
                name=name,
                comment=_text(comment),
                state=word,
                flags=flags,
                reason=_text(reason),
                start=parse_time(start),
                nodes=_text(nodes),
            )
        )
    return tuple(jobs)


def parse_job(text: str) -> SlurmJob | None:
    """Return the job that `scontrol show job ID` has printed; None if it is not as expected.

    Without --oneliner each text that may contain spaces and `=` has a line of its own.
    """
    first, _, rest = text.partition("\n")
    match = _FIRST_LINE.fullmatch(first)
    fields = dict(_job_fields(rest))
    if match is None or "JobState" not in fields:
        return None
    state, flags = _split_state(fields["JobState"])
    status, signal = _exit_code(fields.get("ExitCode", ""))
    # Of an active job, it is the end of its time limit.
    end = parse_time(fields.get("EndTime", ""))
    is_active = state in _ACTIVE
    return SlurmJob(
        id=match[1],
        name=match[2],
        comment=_text(fields.get("Comment", "")),
        state=state,
        flags=flags,
        reason=_text(fields.get("Reason", "")),
        start=parse_time(fields.get("StartTime", "")),
        ended=None if is_active else end,
        nodes=_text(fields.get("NodeList", "")),
        restarts=_number(fields.get("Restarts", "")),
        exit_status=status,
        exit_signal=signal,
        ends_by=end if is_active else None,
        excluded=_text(fields.get("ExcNodeList", "")),
    )


def _job_fields(text: str) -> Iterator[tuple[str, str]]:
    for indented in text.splitlines():
        line = indented.removeprefix("   ")
        name, _, value = line.partition("=")
        if name in _REST_OF_LINE:
            # 22.05 adds a space to comments.
            yield name, value.rstrip()
            continue
        yield from _words(line)


def _words(line: str) -> Iterator[tuple[str, str]]:
    for word in line.split():
        name, has_value, value = word.partition("=")
        if has_value:
            yield name, value


def parse_history(text: str) -> SlurmJob | None:
    """Return the job that `sacct --parsable2` has printed with `HISTORY_FIELDS`; None if there is none."""
    for line in text.splitlines():
        parts = line.split(FIELD)
        if len(parts) != len(HISTORY_FIELDS) or not parts[0].isdecimal():
            continue
        job, state, code, end, nodes, name, comment = parts
        by = _CANCELLED_BY.match(state)
        word, flags = _split_state(state.partition(" ")[0])
        status, signal = _exit_code(code)
        return SlurmJob(
            id=job,
            name=name,
            comment=_text(comment),
            state=word,
            flags=flags,
            ended=parse_time(end),
            nodes=_text(nodes),
            exit_status=status,
            exit_signal=signal,
            cancelled_by=None if by is None else _number(by[1]),
        )
    return None


def parse_partitions(text: str) -> tuple[Partition, ...]:
    """Return the partitions that `scontrol show partition --oneliner` has printed."""
    partitions = []
    for line in text.splitlines():
        fields = dict(_words(line))
        if "PartitionName" not in fields:
            continue
        accounts = fields.get("AllowAccounts", "ALL")
        partitions.append(
            Partition(
                name=fields["PartitionName"],
                is_default=fields.get("Default") == "YES",
                is_up=fields.get("State", "UP") == "UP",
                max_seconds=parse_duration(fields.get("MaxTime", "")),
                default_seconds=parse_duration(fields.get("DefaultTime", "")),
                max_nodes=_number(fields.get("MaxNodes", "")),
                nodes=_number(fields.get("TotalNodes", "")) or 0,
                accounts=() if accounts == "ALL" else tuple(accounts.split(",")),
            )
        )
    return tuple(partitions)


def parse_config(text: str) -> dict[str, str]:
    """Return the values that `scontrol show config` has printed, by name."""
    values = {}
    for line in text.splitlines():
        name, has_value, value = line.partition("=")
        if has_value and not line.startswith(" "):
            values[name.strip()] = value.strip()
    return values


def parse_nodes(text: str) -> tuple[Node, ...]:
    """Return the nodes that `scontrol show node --oneliner` has printed."""
    nodes = []
    for line in text.splitlines():
        # Its first words have no spaces; what follows the operating system may have them.
        fields: dict[str, str] = {}
        for name, value in _words(line):
            fields.setdefault(name, value)
        if "NodeName" not in fields:
            continue
        state, flags = _split_state(fields.get("State", ""))
        name = fields["NodeName"]
        nodes.append(
            Node(
                name=name,
                address=fields.get("NodeAddr", name),
                # An asterisk: it does not answer.
                state=state.rstrip("*"),
                is_silent=state.endswith("*"),
                flags=flags,
                kind=" ".join(fields.get(each, "") for each in _KIND),
            )
        )
    return tuple(nodes)


def parse_expected_start(text: str) -> datetime | None:
    """Return when a job would start, as `sbatch --test-only` has printed it, or None."""
    match = _START.search(text)
    return None if match is None else parse_time(match[1])


def parse_time(text: str) -> datetime | None:
    """Return a time that a command has printed in UTC; None if it is unknown."""
    try:
        return datetime.strptime(text, "%Y-%m-%dT%H:%M:%S").replace(tzinfo=UTC)
    except ValueError:
        return None


def parse_duration(text: str) -> int | None:
    """Return the seconds of a time such as `1-12:00:00`, `30:00` or `5` (minutes); None for no limit or no time."""
    match = _DURATION.fullmatch(text)
    if match is None:
        return None
    days, first, second, third = match.groups()
    if days is not None:
        # Behind days come hours, minutes and seconds.
        return ((int(days) * 24 + int(first)) * 60 + int(second or 0)) * 60 + int(third or 0)
    if third is not None:
        return (int(first) * 60 + int(second)) * 60 + int(third)
    return int(first) * 60 + int(second or 0)


def _split_state(text: str) -> tuple[str, frozenset[str]]:
    """Return a state and its flags: newer versions print `RUNNING+COMPLETING` or `RUNNING,COMPLETING`."""
    state, *flags = re.split(r"[+, ]+", text.strip())
    return state, frozenset(flags)


def _exit_code(text: str) -> tuple[int | None, int | None]:
    """Return status and signal of `1:0`."""
    status, _, signal = text.partition(":")
    return _number(status), _number(signal)


def _number(text: str) -> int | None:
    return int(text) if _NUMBER.fullmatch(text) else None


def _text(value: str) -> str:
    return "" if value in _NONE else value
