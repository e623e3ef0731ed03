"""Explanation of a run: the rules applied to its status and log."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from cloudtrain.failure_rules.advice import advise, lacks_gpu
from cloudtrain.failure_rules.classes import FailureClass
from cloudtrain.failure_rules.error_groups import ErrorGroup
from cloudtrain.failure_rules.facts import Facts, kind_of_job, place_of
from cloudtrain.failure_rules.log_reader import LogReader
from cloudtrain.failure_rules.rules import (
    Advice,
    Causality,
    Source,
    advice_for,
    first_match,
)
from cloudtrain.failure_rules.rules.base import here, in_account
from cloudtrain.failure_rules.tracebacks import parse_exception
from cloudtrain.runs.early_end import OUTSIDE_STOP
from cloudtrain.runs.log_lines import RANK_FAILED, LogLine
from cloudtrain.runs.status import UNSTORED, State, Status
from cloudtrain.support.backend_facts import facts_of
from cloudtrain.support.notebook.summary import Row, Summary, count
from cloudtrain_runtime.contract import sort_hosts

_MESSAGE_CHARACTERS = 400
_LEAST_CHARACTERS = 8
"""Shorter messages, such as `Killed`, occur in many reasons."""

_RANKS_NAMED = 8
_PLACEHOLDER = re.compile(r"\[(?P<field>[a-z_]+(?:\.[a-z_]+)*)\]|\{(?P<found>\w+)\}")
_REPEATED_REASON = re.compile(
    r"^rank \d+ |^error: |^hang: |^AlgorithmError|^(?:torchrun|the agent of the ranks) on |^pip could not install"
    r"|^the container of "
)
"""Reasons that repeat the message of a process. The log has more details."""

_SLURM_ENDS: tuple[tuple[str, FailureClass | None, str], ...] = (
    # cloudtrain/backends/slurm/queue_states.py
    ("cancelled by you (scancel)", None, "You have cancelled the job in Slurm; {again}."),
    ("(scancel)", None, "The job was cancelled in Slurm; {again}."),
    (
        "Slurm's time limit ended the job",
        FailureClass.TIME_LIMIT,
        (
            "Save more often (checkpoint.every), so that the run continues by itself, or give the job more time: "
            "[limits.runtime], and time of the site; {again}."
        ),
    ),
    (
        "preempted by a job of a higher priority",
        None,
        (
            "Without --no-requeue, Slurm queues such a run again; jobs of another slurm.partition or slurm.qos may not be "
            "preempted; {again}."
        ),
    ),
    (
        "attempts in a row ended without a new checkpoint",
        FailureClass.UNKNOWN,
        (
            "Each attempt was interrupted before it had saved: save more often (checkpoint.every), or give an attempt more "
            "time (time of the site); {again}."
        ),
    ),
    (
        "a node of the job failed",
        FailureClass.KILLED,
        "See why: sinfo --list-reasons. Without --no-requeue, Slurm queues such a run again; {again}.",
    ),
)
"""Parts of the reasons of runs that Slurm has ended: the class of the failure, and what to do."""

_READ_LOGS = (
    in_account("Read the end of each host's log, and try it here: cloudtrain submit JOB --local."),
    here("Read the end of each host's log."),
)
_BARE_TYPE = re.compile(r"[\w.]+:")
_NAMED_RANK = re.compile(r"\brank (?P<rank>\d+) on (?P<host>\S+) ")


@dataclass(frozen=True)
class Explanation:
    """Why a run has failed, and what to do.

    Attributes:
        failure: The class of the failure; None if nothing failed, for example in a run that was stopped by request.
        message: The error message that was printed first.
        action: What to do next, in one or two sentences; empty if there is nothing to do.
        host: Host that printed the message first, or None.
        rank: Rank that printed the message first, or None; for a hang, the missing rank.
        step: Newest step before the end, or None.
        traceback: The frames in the job's own code, and the exception; may be empty.
        ranks: All ranks that printed the message.
        hosts: All hosts that printed the message.
        last_lines: End of the log, if no rule matches any line.
        place: File and line of the job's own code that raised the exception (`train.py:12`), or None.
        is_of_all_ranks: Whether each of the run's ranks, of which there are several, printed the message.
        advice: Why much of the paid time of a run that has ended was not training, and what to change.
    """

    run: str
    state: State
    failure: FailureClass | None
    message: str
    action: str = ""
    host: str | None = None
    rank: int | None = None
    step: int | None = None
    traceback: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    last_lines: tuple[str, ...] = ()
    place: str | None = None
    is_of_all_ranks: bool = False
    advice: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        """Where it failed: `rank 1, algo-2, after step 9`, or `all 4 ranks, after step 9`; empty if unknown."""
        parts: list[str] = []
        if self.is_of_all_ranks:
            parts.append(f"all {len(self.ranks)} ranks")
        if self.rank is not None and not self.is_of_all_ranks:
            parts.append(f"rank {self.rank}")
        if self.host is not None and not self.is_of_all_ranks:
            parts.append(self.host)
        if self.step is not None:
            parts.append(f"after step {self.step:,}")
        return ", ".join(parts)

    def __repr__(self) -> str:
        return _summarize(self).to_text()

    def _repr_html_(self) -> str:
        return _summarize(self).to_html()

    def to_json(self) -> dict[str, Any]:
        """Return the object that `explain --json` prints."""
        fields = dataclasses.asdict(self)
        failure = fields.pop("failure")
        return {**fields, "class": failure and str(failure)}


def explain_run(
    status: Status, lines: Iterable[LogLine], facts: Facts | None = None
) -> Explanation:
    """Explain how a run ended, or why it makes no progress.

    The lines are read once and not kept. The lines of one host must be in order. The hosts can be read one after the
    other or interleaved, because lines with a time are ordered by it.

    Args:
        status: The run's status. Its reason decides if SageMaker itself ended the run.
        lines: The log of all hosts.
        facts: The job's values by field of job.yaml, to fill into the action.
    """
    known = {"run": status.run, **(facts or {})}
    found = (
        _explain_slurm_end(status, known)
        or _explain_status(status, known)
        or _explain_log(status, lines, known)
    )
    action = found.action
    # The rules about checkpoints have more details than the message.
    if found.failure is not FailureClass.CHECKPOINT:
        action = advise(action, found.message, backend=status.backend, facts=known)
    failure = found.failure
    is_billed = facts_of(status.backend).is_billed
    if failure is FailureClass.IMAGE_PULL and not is_billed and lacks_gpu(found.message):
        # There is no instance whose image could be wrong.
        failure = FailureClass.USER_CODE
    return dataclasses.replace(found, action=action, failure=failure)


def _explain_log(status: Status, lines: Iterable[LogLine], facts: Facts) -> Explanation:
    log = _read_log(lines)
    groups = [
        group for group in log.errors.groups.values() if not _has_survived(log, group, status)
    ]
    reason = _read_log(LogLine("", text) for text in _reason_lines(status.reason))
    best = _closest_to_cause(groups, log)
    from_reason = _closest_to_cause(reason.errors.groups.values(), reason)
    if best is None or (
        from_reason is not None and from_reason.first.causality < best.first.causality
    ):
        best = from_reason
    if best is None:
        return _explain_unknown(status, log, facts)
    return _explain_group(status, best, log, facts)


def _explain_status(status: Status, facts: Facts) -> Explanation | None:
    if status.state is State.SUCCEEDED:
        # Warnings about the success itself: other ones are in the status.
        doubts = [*status.success_warnings()]
        if UNSTORED in status.reason:
            doubts.append(status.reason)
        message = "the run has succeeded"
        if doubts:
            message += ", with a warning"
        return _make_explanation(status, None, message, "; ".join(doubts))
    if status.state in (State.STOPPED, State.STOPPING):
        return _explain_stop(status, facts)
    matched = None
    # Such a reason repeats the log, which has more.
    if not _REPEATED_REASON.match(status.reason):
        source = Source.REASON if status.state is State.FAILED else Source.MESSAGE
        matched = first_match(status.reason, source)
    if matched is not None:
        rule, groups = matched
        action = _fill(rule.action, status, facts, groups)
        return _make_explanation(status, rule.failure_class, _first_line(status.reason), action)
    # A cluster suspends a job, and continues it.
    is_suspended = status.state is State.INTERRUPTED and not status.uses_account
    if is_suspended or status.state in (State.QUEUED, State.STARTING):
        return _make_explanation(status, None, status.reason or "the run has not started yet")
    if status.state is State.INTERRUPTED:
        action = "Nothing: the run continues when capacity is back. It waits at most [cluster.spot.max_wait]."
        message = status.reason or "spot capacity was taken away"
        return _make_explanation(status, FailureClass.SPOT, message, _fill(action, status, facts))
    return None


def _explain_slurm_end(status: Status, facts: Facts) -> Explanation | None:
    if status.state not in (State.STOPPED, State.FAILED):
        return None
    again = "continue from the last checkpoint with checkpoint.resume: {run}"
    if status.progress.checkpoint is None:
        again = "it has saved no checkpoint: submit it again"
    for words, failure, action in _SLURM_ENDS:
        if words in status.reason:
            filled = _fill(action.replace("{again}", again), status, facts)
            return _make_explanation(status, failure, status.reason, filled)
    return None


def _explain_stop(status: Status, facts: Facts) -> Explanation:
    resume = "continue from the last checkpoint with checkpoint.resume: {run}"
    failure: FailureClass | None = None
    action = ""
    if status.progress.checkpoint is not None:
        action = f"Nothing went wrong; {resume}."
    if status.reason.startswith(OUTSIDE_STOP):
        action = (
            "Something else than cloudtrain has stopped it, such as a logout, a reboot or a scheduler. "
            f"Fix that, and {resume}."
        )
    elif status.reason.startswith("MaxRuntimeExceeded"):
        failure = FailureClass.TIME_LIMIT
        action = f"Raise [limits.runtime] and {resume}."
    elif status.reason.startswith(("MaxWaitTimeExceeded", "interrupted")):
        failure = FailureClass.SPOT
        action = f"Raise [cluster.spot.max_wait] or remove cluster.spot, and {resume}."
    elif status.reason.startswith("MaxPendingTimeExceeded"):
        failure = FailureClass.CAPACITY
        action = "Submit again later, name several types in cluster.prefer, or raise [cluster.max_pending]."
    return _make_explanation(
        status, failure, status.reason or "stopped by request", _fill(action, status, facts)
    )


def _make_explanation(
    status: Status, failure: FailureClass | None, message: str, action: str = ""
) -> Explanation:
    return Explanation(
        run=status.run,
        state=status.state,
        failure=failure,
        message=message,
        action=action,
        step=status.progress.last_step,
    )


def _read_log(lines: Iterable[LogLine]) -> LogReader:
    reader = LogReader()
    for line in lines:
        reader.read(line)
    reader.finish()
    return reader


def _reason_lines(reason: str) -> Iterator[str]:
    """Yield the log lines that a reason consists of.

    AWS's toolkit quotes the exception, `ErrorMessage "ValueError: ..."`; our launcher starts with the rank.
    """
    lines = reason.removeprefix("AlgorithmError: ").replace("\\n", "\n").splitlines()
    has_frames = any(line.startswith("  File ") for line in lines)
    for line in lines:
        text = re.sub(r'^\s*ErrorMessage "+', "", line).rstrip('"')
        message = RANK_FAILED.sub("", text)
        if message != text:
            yield text
        is_exception = parse_exception(message) is not None and not message.startswith(
            "ExecuteUserScriptError"
        )
        if not has_frames and is_exception:
            if message == text:
                yield "Traceback (most recent call last):"
            yield message
        elif message == text:
            yield text


def _has_survived(log: LogReader, group: ErrorGroup, status: Status) -> bool:
    """Whether the job made progress after the error. An error that the run's reason repeats ended it nonetheless."""
    if not log.tracker.has_progressed_since(group.last):
        return False
    message = _first_line(group.first.exception.text)
    return len(message) < _LEAST_CHARACTERS or message not in status.reason


def _closest_to_cause(groups: Iterable[ErrorGroup], log: LogReader) -> ErrorGroup | None:
    """Return the group that is closest to the cause; of several, the first in time."""

    def key(group: ErrorGroup) -> tuple[int, float, int]:
        position = group.first.position
        host = log.tracker.hosts.get(group.first.host)
        time = position.time
        if time is None and host is not None:
            # A log without times: the launcher reports when the first rank of the host failed.
            time = host.failed_at
        if time is None:
            time = float("inf")
        return group.first.causality, time, position.order

    return min(groups, key=key, default=None)


def _explain_group(status: Status, group: ErrorGroup, log: LogReader, facts: Facts) -> Explanation:
    first = group.first
    ranks = {rank for _, rank in group.members if rank is not None}
    rank = first.rank
    if rank is None and not ranks and first.host in log.tracker.hosts:
        rank = log.tracker.hosts[first.host].reported_rank
        if rank is not None:
            ranks = {rank}
    message = _headline(first.exception.text)
    named = _NAMED_RANK.search(status.reason)
    host: str | None = first.host
    if not host:
        host = named["host"] if named else None
    # Of equal errors the one that the launchers have agreed on: the status names it, too.
    if named is not None and (named["host"], int(named["rank"])) in group.members:
        host = named["host"]
        rank = int(named["rank"])
    hosts = {name for name, _ in group.members if name}
    if not hosts and host:
        hosts = {host}
    found = dict(first.found)
    if first.rule.failure_class is FailureClass.HANG:
        missing = log.collectives.missing_ranks(status.world_size)
        found.setdefault("missing", _name_ranks(missing, "the rank that is not among them"))
        # The launcher's message has more details than those of the waiting ranks.
        if missing and first.causality is not Causality.CAUSE:
            message = _describe_hang(log, missing)
            rank = missing[0]
            host = _host_of(rank, status.world_size, log)
    frame = first.exception.last_user_frame
    if frame is not None:
        found["place"] = frame.place
    found.setdefault("place", "what the message names")
    step = first.position.step
    if step is None:
        step = status.progress.last_step
    return Explanation(
        run=status.run,
        state=status.state,
        failure=first.rule.failure_class,
        message=message,
        action=_fill(first.rule.action, status, facts, found),
        host=host,
        rank=rank,
        step=step,
        place=None if frame is None else frame.place,
        traceback=first.exception.format_short() if first.exception.frames else (),
        ranks=tuple(sorted(ranks)),
        is_of_all_ranks=1 < len(ranks) == status.world_size,
        hosts=tuple(sort_hosts(list(hosts))),
    )


def _describe_hang(log: LogReader, missing: tuple[int, ...]) -> str:
    work = log.collectives.waited_for
    if work is None:
        return f"{_name_ranks(missing, '')} did not join a barrier"
    number, operation = work
    waited = f"the others waited {log.collectives.seconds:.0f} s"
    return f"{_name_ranks(missing, '')} did not join {operation} number {number}; {waited}"


def _name_ranks(ranks: tuple[int, ...], otherwise: str) -> str:
    if not ranks:
        return otherwise
    named = ", ".join(map(str, ranks[:_RANKS_NAMED]))
    if len(ranks) > _RANKS_NAMED:
        named += " ..."
    return f"ranks {named}" if len(ranks) > 1 else f"rank {named}"


def _host_of(rank: int, world_size: int | None, log: LogReader) -> str | None:
    """Return the host of a rank, or None if it is unknown. Each host has equally many ranks, in SageMaker's order."""
    hosts = sort_hosts([name for name in log.tracker.hosts if name])
    if not hosts or not world_size or world_size % len(hosts):
        return None
    return hosts[min(rank // (world_size // len(hosts)), len(hosts) - 1)]


def _explain_unknown(status: Status, log: LogReader, facts: Facts) -> Explanation:
    if status.state is not State.FAILED:
        return _make_explanation(status, None, "nothing has failed so far")
    reporting = ((name, host.reported_rank) for name, host in log.tracker.hosts.items())
    host, rank = next((pair for pair in reporting if pair[1] is not None), (None, None))
    message = _first_line(status.reason)
    if not message and log.last_lines:
        message = _first_line(log.last_lines[-1])
    message = message or "the run left neither a reason nor a log"
    action = advice_for(_READ_LOGS, kind_of_job(facts), place_of(status.backend))
    explanation = _make_explanation(status, FailureClass.UNKNOWN, message, action)
    return dataclasses.replace(explanation, host=host, rank=rank, last_lines=tuple(log.last_lines))


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:_MESSAGE_CHARACTERS]


def _headline(text: str) -> str:
    """Return the first line of an exception; where it has only the type, the message's first line behind it."""
    first, _, rest = text.strip().partition("\n")
    if not _BARE_TYPE.fullmatch(first):
        return _first_line(first)
    return _first_line(f"{first} {rest.strip()}")


def _fill(
    advice: Advice,
    status: Status,
    facts: Facts,
    found: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Return what to advise for this job where it ran, with the values of the job and of the message."""

    def replace(match: re.Match[str]) -> str:
        if match["found"] is not None:
            return found.get(match["found"]) or facts.get(match["found"]) or "it"
        field = match["field"]
        value = facts.get(field)
        if field == "role":
            return value or "of the job"
        return f"{field} (now {value})" if value is not None else field

    action = advice_for(advice, kind_of_job(facts), place_of(status.backend))
    return _PLACEHOLDER.sub(replace, action)


def _summarize(found: Explanation) -> Summary:
    """Return a summary of an explanation; the HTML table has the traceback or the last lines, too."""
    lines = found.traceback or found.last_lines
    name = "traceback" if found.traceback else "last lines"
    details = [("" if index else name, line) for index, line in enumerate(lines)]
    return Summary(
        f"Explanation of {found.run}: {found.state}", tuple(_summary_rows(found)), details
    )


def _summary_rows(found: Explanation) -> Iterator[Row]:
    if found.failure is not None:
        yield "why", found.failure.words
    yield "message", found.message
    if found.where:
        yield "where", found.where
    if len(found.ranks) > 1 and not found.is_of_all_ranks:
        yield "reported by", count(len(found.ranks), "rank")
    if found.action:
        yield "action", found.action
    for text in found.advice:
        yield "advice", text
