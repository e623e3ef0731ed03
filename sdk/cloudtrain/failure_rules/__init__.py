"""Why a run has failed: the first error in time that is no echo of another, its class, and one thing to do.

Pure: what is known of the run comes in, an explanation goes out. The rules are data in `rules`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cloudtrain.failure_rules.advice import advise, lacks_gpu
from cloudtrain.failure_rules.classes import FailureClass
from cloudtrain.failure_rules.job_values import Facts, read_facts
from cloudtrain.failure_rules.log_reader import Reader
from cloudtrain.failure_rules.matches import Group
from cloudtrain.failure_rules.rules import Place, Weight, first_match
from cloudtrain.failure_rules.tracebacks import as_exception
from cloudtrain.runs.log_lines import LogLine
from cloudtrain.runs.status import State, Status
from cloudtrain_runtime.contract import sort_hosts

__all__ = ["Explanation", "Facts", "FailureClass", "explain", "read_facts"]

_MESSAGE_CHARACTERS = 400
_PLACEHOLDER = re.compile(r"\[(?P<field>[a-z_]+(?:\.[a-z_]+)*)\]|\{(?P<found>\w+)\}")
_OWN_REASON = re.compile(
    r"^rank \d+ |^error: |^hang: |^AlgorithmError|^torchrun on |^pip could not install|^the container of "
)
"""Reasons that only repeat what a process has said: the log knows more."""

_TOLD_BY_RANK = re.compile(r"^rank \d+ on \S+ \(local rank \d+\) failed: ")


@dataclass(frozen=True)
class Explanation:
    """Why a run has failed, and what to do.

    Attributes:
        failure: The class; None where nothing has failed, such as in a run that was stopped by request.
        message: What went wrong, in the words of who said it first.
        host: Where it was said first, or None.
        rank: Who said it first, or None; for a hang the rank that is missing.
        step: Newest step before the end, or None.
        traceback: The lines that its reader needs, the user's own frames; may be empty.
        ranks: All ranks that said the same.
        hosts: Hosts of all that said the same.
        last_lines: The end of the log, where nothing in it tells why.
        action: The next thing to do, in one or two sentences; empty where there is nothing to do.
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

    def to_json(self) -> dict[str, Any]:
        """Return the object that `explain --json` prints."""
        return {
            "run": self.run,
            "state": str(self.state),
            "class": None if self.failure is None else str(self.failure),
            "rank": self.rank,
            "host": self.host,
            "step": self.step,
            "message": self.message,
            "traceback": list(self.traceback),
            "ranks": list(self.ranks),
            "hosts": list(self.hosts),
            "last_lines": list(self.last_lines),
            "action": self.action,
        }


def explain(status: Status, lines: Iterable[LogLine], facts: Facts | None = None) -> Explanation:
    """Explain how a run has ended, or why it does not come on.

    The lines are read once and not kept. Those of a host must come in their order; hosts may come one after the
    other or mixed, because lines with a time are ordered by it.

    Args:
        status: The run's status. Its reason decides where SageMaker itself ended the run.
        lines: The log of all hosts.
        facts: The job's own values by field of job.yaml, for the action.
    """
    known = {"run": status.run, **(facts or {})}
    found = _explain(status, lines, known)
    action = advise(found.action, found.message, backend=status.backend, facts=known)
    lacks_image = found.failure is FailureClass.IMAGE_PULL
    is_about_gpu = lacks_image and status.backend != "sagemaker" and lacks_gpu(found.message)
    return dataclasses.replace(found, action=action, failure=FailureClass.USER_CODE if is_about_gpu else found.failure)


def _explain(status: Status, lines: Iterable[LogLine], known: Facts) -> Explanation:
    decided = _from_status(status, known)
    if decided is not None:
        return decided
    log = _read(lines)
    groups = [group for group in log.findings.groups.values() if not _is_past(log, group, status)]
    told = _read(LogLine("", text) for text in _reason_lines(status.reason))
    best = _best(groups, log)
    from_reason = _best(told.findings.groups.values(), told)
    if best is None or (from_reason is not None and from_reason.first.weight < best.first.weight):
        best = from_reason or best
    if best is None:
        return _unknown(status, log)
    return _of_group(status, best, log, known)


# ---------------------------------------------------------------- what the status alone tells


def _from_status(status: Status, facts: Facts) -> Explanation | None:
    """Return the explanation where no log can know better."""
    if status.state is State.SUCCEEDED:
        return _bare(status, None, "the run has succeeded")
    if status.state in (State.STOPPED, State.STOPPING):
        return _of_stop(status, facts)
    place = Place.REASON if status.state is State.FAILED else Place.MESSAGE
    matched = None if _OWN_REASON.match(status.reason) else first_match(status.reason, place)
    if matched is not None:
        rule, match = matched
        return _bare(status, rule.failure, _first_line(status.reason), _fill(rule.action, facts, match.groupdict()))
    return _of_wait(status, facts)


def _of_wait(status: Status, facts: Facts) -> Explanation | None:
    """Return the explanation of a run that does not train now, though nothing has failed."""
    if status.state in (State.QUEUED, State.STARTING):
        return _bare(status, None, status.reason or "the run has not started yet")
    if status.state is State.INTERRUPTED:
        action = "Nothing: it goes on when capacity is back, at the latest after [cluster.spot.max_wait]."
        message = status.reason or "spot capacity was taken away"
        return _bare(status, FailureClass.SPOT, message, _fill(action, facts, {}))
    return None


def _of_stop(status: Status, facts: Facts) -> Explanation:
    goes_on = "go on from the last checkpoint with checkpoint.resume: {run}"
    if status.reason.startswith("MaxRuntimeExceeded"):
        action = f"Raise [limits.runtime] and {goes_on}."
        return _bare(status, FailureClass.TIME_LIMIT, status.reason, _fill(action, facts, {}))
    if status.reason.startswith(("MaxWaitTimeExceeded", "interrupted")):
        action = f"Raise [cluster.spot.max_wait] or do without cluster.spot, and {goes_on}."
        return _bare(status, FailureClass.SPOT, status.reason, _fill(action, facts, {}))
    if status.reason.startswith("MaxPendingTimeExceeded"):
        action = "Submit again later, name several types in cluster.prefer, or raise [cluster.max_pending]."
        return _bare(status, FailureClass.CAPACITY, status.reason, _fill(action, facts, {}))
    action = f"Nothing went wrong; {goes_on}." if status.progress.checkpoint is not None else ""
    return _bare(status, None, status.reason or "stopped by request", _fill(action, facts, {}))


def _bare(status: Status, failure: FailureClass | None, message: str, action: str = "") -> Explanation:
    return Explanation(status.run, status.state, failure, message, action, step=status.progress.last_step)


# ---------------------------------------------------------------- what the log tells


def _read(lines: Iterable[LogLine]) -> Reader:
    reader = Reader()
    for line in lines:
        reader.read(line)
    reader.finish()
    return reader


def _reason_lines(reason: str) -> Iterator[str]:
    """Yield a reason as the log lines that it is made of.

    AWS's toolkit quotes the exception, `ErrorMessage "ValueError: ..."`; ours starts with the rank.
    """
    lines = reason.removeprefix("AlgorithmError: ").replace("\\n", "\n").splitlines()
    has_frames = any(line.startswith("  File ") for line in lines)
    for line in lines:
        text = re.sub(r'^\s*ErrorMessage "+', "", line).rstrip('"')
        told = _TOLD_BY_RANK.sub("", text)
        if told != text:
            yield text
        if not has_frames and as_exception(told) is not None and not told.startswith("ExecuteUserScriptError"):
            if told == text:
                yield "Traceback (most recent call last):"
            yield told
        elif told == text:
            yield text


def _is_past(log: Reader, group: Group, status: Status) -> bool:
    """Whether the job went on after it; what the run's reason repeats was the end all the same."""
    if not log.went_on.after(group.last):
        return False
    words = _first_line(group.first.raised.text)
    return len(words) < 8 or words[:_MESSAGE_CHARACTERS] not in status.reason  # noqa: PLR2004 (`Killed` is in many)


def _best(groups: Iterable[Group], log: Reader) -> Group | None:
    """Return the group nearest to the cause, of equal ones the first in time."""

    def key(group: Group) -> tuple[int, float, int]:
        moment = group.first.moment
        host = log.went_on.hosts.get(group.first.host)
        time = host.failed_at if moment.time is None and host is not None else moment.time
        return group.first.weight, float("inf") if time is None else time, moment.order

    return min(groups, key=key, default=None)


def _of_group(status: Status, group: Group, log: Reader, facts: Facts) -> Explanation:
    first = group.first
    reported = log.went_on.hosts[first.host].root_rank if first.host in log.went_on.hosts else None
    ranks = {rank for _, rank in group.members if rank is not None}
    rank = first.rank
    if rank is None and not ranks and reported is not None and reported >= 0:
        rank = reported
        ranks = {reported}
    message = _first_line(first.raised.text)
    host: str | None = first.host or _host_in(status.reason)
    hosts = {name for name, _ in group.members if name} or ({host} if host else set())
    found = dict(first.found)
    if first.rule.failure is FailureClass.HANG:
        missing = log.collectives.missing(status.world_size)
        found.setdefault("missing", _ranks(missing, "the rank that is not among these"))
        # The launcher's own words say more than what the waiting ranks can tell.
        if missing and first.weight is not Weight.CAUSE:
            message = _hang(log, missing)
            rank, host = missing[0], _host_of(missing[0], status.world_size, log)
    frame = first.raised.last_user_frame
    if frame is not None:
        found["place"] = frame.place
    found.setdefault("place", "what the message names")
    step = first.moment.step if first.moment.step is not None else status.progress.last_step
    return Explanation(
        run=status.run,
        state=status.state,
        failure=first.rule.failure,
        message=message,
        action=_fill(first.rule.action, facts, found),
        host=host,
        rank=rank,
        step=step,
        traceback=first.raised.shortest() if first.raised.frames else (),
        ranks=tuple(sorted(ranks)),
        hosts=tuple(sort_hosts(list(hosts))),
    )


def _hang(log: Reader, missing: tuple[int, ...]) -> str:
    work = log.collectives.waited_for
    if work is None:
        return f"{_ranks(missing, '')} did not come to a barrier"
    number, operation = work
    waited = f"the others waited {log.collectives.seconds:.0f} s"
    return f"{_ranks(missing, '')} did not come to {operation} number {number}; {waited}"


def _ranks(ranks: tuple[int, ...], otherwise: str) -> str:
    if not ranks:
        return otherwise
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}" + (" ..." if len(ranks) > 8 else "")  # noqa: PLR2004 (fits a line)


def _host_of(rank: int, world_size: int | None, log: Reader) -> str | None:
    """Return the host of a rank: hosts have equally many, in SageMaker's order."""
    hosts = sort_hosts([name for name in log.went_on.hosts if name])
    if not hosts or not world_size or world_size % len(hosts):
        return None
    return hosts[min(rank // (world_size // len(hosts)), len(hosts) - 1)]


def _host_in(reason: str) -> str | None:
    match = re.search(r"\brank \d+ on (\S+) ", reason)
    return match[1] if match else None


def _unknown(status: Status, log: Reader) -> Explanation:
    if status.state is not State.FAILED:
        return _bare(status, None, "nothing has failed so far")
    hosts = log.went_on.hosts.items()
    reported = {name: log_.root_rank for name, log_ in hosts if log_.root_rank is not None and log_.root_rank >= 0}
    message = (
        _first_line(status.reason)
        or _first_line(log.last_lines[-1] if log.last_lines else "")
        or "the run has left neither a reason nor a log"
    )
    action = "Read the end of each host's log, and try it here: cloudtrain submit JOB --local."
    host = next(iter(reported), None)
    told = _bare(status, FailureClass.UNKNOWN, message, action)
    rank = reported[host] if host is not None else None
    return dataclasses.replace(told, host=host, rank=rank, last_lines=tuple(log.last_lines))


# ---------------------------------------------------------------- words


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:_MESSAGE_CHARACTERS]


def _fill(action: str, facts: Facts, found: Mapping[str, str | None]) -> str:
    """Return an action with the job's own values and what the pattern has found."""

    def replace(match: re.Match[str]) -> str:
        if match["found"] is not None:
            return found.get(match["found"]) or facts.get(match["found"]) or "it"
        field = match["field"]
        value = facts.get(field)
        if field == "role":
            return value or "of the job"
        return f"{field} (now {value})" if value is not None else field

    return _PLACEHOLDER.sub(replace, action)
