"""Reader of logs: finds errors line by line, in constant memory."""

from __future__ import annotations

import dataclasses
import re
from collections import deque
from dataclasses import dataclass

from cloudtrain.failure_rules.collectives import CollectiveTimeouts
from cloudtrain.failure_rules.error_groups import (
    Classified,
    ErrorGroups,
    ErrorReport,
    HostLog,
    LogPosition,
    ProgressTracker,
    classify,
)
from cloudtrain.failure_rules.rules import Rule, first_line_match
from cloudtrain.failure_rules.tracebacks import (
    HEAD_AT_END,
    MOST_FOREIGN_LINES,
    OpenTraceback,
    RaisedException,
    open_traceback,
    parse_exception,
)
from cloudtrain.runs.log_lines import LogLine, split_rank
from cloudtrain_runtime.contract import parse_event
from cloudtrain_runtime.contract.early_ends import describe_early_end
from cloudtrain_runtime.contract.events import Event

_LINE_CHARACTERS = 4000
_LAST_LINES = 5
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_RAY_WORKER = re.compile(r"^\([^()]*\bpid=\d+(?:, ip=[\d.:a-f]+)?\) ?")
"""Beginning of a line that Ray has read from one of its workers: `(RayTrainWorker pid=4556)`."""
_NAMED_RANK = re.compile(r"\b[Rr]ank (?P<rank>\d+)\b")

_NOT_ORDINARY = re.compile(
    r"^(?:\s|wandb:|frame #|#\d+ |Thread 0x|Current thread|\S+:\d+:\d+ \[\d+\] |libfabric:|[WEI]\d{4} |\[[WEI]\d{3,4} "
    r"|\*{3}|-{5}|={5}|\[\d+\]:$|Failures:|Root Cause|Exception raised from|what\(\):|terminate called)"
)
"""Lines that a job prints while it fails. They are no sign of progress."""

_HANDLED = re.compile(
    r"\b(?:WARN|WARNING|INFO|DEBUG|[Rr]etry(?:ing)?|[Ii]gnor(?:ed|ing)|[Ss]kipp(?:ed|ing))\b|--- Logging error ---"
)
_TRACEBACK_HEADS = ("Traceback (", "Original Traceback (", "rank ")
_CHAIN = (
    "During handling of the above exception",
    "The above exception was the direct cause",
    "-- Process ",
)
_CONTINUATION = re.compile(
    r"^\s+\S|^nccl\w+(?:Error|Usage|Argument|Progress): |^Last error:|^CUDA kernel errors|^Compile with"
)
_CONTINUATIONS = 8
_REPORT_RANK = re.compile(r"^\s+rank\s+: (?P<rank>\d+) \(local_rank: \d+\)")
_PROGRESS_EVENTS = frozenset({"started", "step", "evaluation", "checkpoint", "finished"})


@dataclass
class _Stream:
    """The output of one rank of a host, or of all its ranks without a prefix.

    Attributes:
        open: The traceback that is being read.
        pending: An error whose message may continue on the next lines.
        chain: Exceptions that the next one was raised from.
        is_linked: Whether the next traceback belongs to the chain.
        continued: Number of lines that continued the message.
        previous: The last ordinary line.
        is_logged: Whether a logger printed the traceback as a warning.
    """

    rank: int | None
    open: OpenTraceback | None = None
    pending: ErrorReport | None = None
    chain: tuple[RaisedException, ...] = ()
    is_linked: bool = False
    continued: int = 0
    previous: str = ""
    is_logged: bool = False


class LogReader:
    """Collects the errors of a log. The hosts can come in any order; the lines of one host must be in order."""

    def __init__(self) -> None:
        self.tracker = ProgressTracker()
        self.errors = ErrorGroups(self.tracker)
        self.collectives = CollectiveTimeouts()
        self.last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._streams: dict[tuple[str, int | None], _Stream] = {}
        self._left: list[tuple[Event, LogPosition]] = []
        self._order = 0

    def read(self, line: LogLine) -> None:
        """Read the next line."""
        self._order += 1
        host = self.tracker.hosts[line.host]
        rank, text = _clean(line.text)
        if (event := parse_event(text)) is not None:
            self._read_event(host, line, event)
            return
        self.collectives.read(text)
        stream = self._streams.get((line.host, rank))
        if stream is None:
            stream = self._streams[line.host, rank] = _Stream(rank)
        if not self._read_traceback(host, line, stream, text):
            self._read_line(host, line, stream, text)

    def finish(self) -> None:
        """Complete the open tracebacks after the last line."""
        for stream in self._streams.values():
            self._flush(stream)
        # If the ranks of some hosts have ended, those of the others may have waited for them.
        if len(self._left) < len(self.tracker.hosts):
            for event, position in self._left:
                self._add_early_end(event, position)

    def _add_early_end(self, event: Event, position: LogPosition) -> None:
        text = describe_early_end(event["ranks"], event["host"], event.get("step"))
        if event["ranks"] and (matched := first_line_match(text)) is not None:
            raised = RaisedException(text)
            self.errors.add(ErrorReport(*matched, raised, event["ranks"][0], position))

    def _read_traceback(self, host: HostLog, line: LogLine, stream: _Stream, text: str) -> bool:
        is_idle = stream.open is None and stream.pending is None
        # Most lines end here.
        if is_idle and not text.startswith(_TRACEBACK_HEADS) and not text.endswith(HEAD_AT_END):
            return False
        opened = open_traceback(text)
        if opened is not None:
            self._open(stream, opened, text)
            return True
        if stream.pending is not None and self._continue(stream, text):
            return True
        if stream.open is None:
            return False
        taken = stream.open.add_line(text)
        if isinstance(taken, RaisedException):
            self._add_exception(host, line, stream, taken)
            return True
        if stream.open.foreign_lines > MOST_FOREIGN_LINES:
            stream.open = None
        return bool(taken)

    def _open(self, stream: _Stream, opened: OpenTraceback, text: str) -> None:
        if text.startswith("Original"):
            stream.pending = None
            stream.is_linked = True
        if stream.open is not None and opened.rank is None:
            stream.open.open_count += 1
            return
        if not stream.is_linked:
            self._flush(stream)
        stream.is_linked = False
        stream.open = opened
        stream.is_logged = not stream.chain and _HANDLED.search(stream.previous) is not None

    def _add_exception(
        self, host: HostLog, line: LogLine, stream: _Stream, raised: RaisedException
    ) -> None:
        opened = stream.open
        if opened is None:
            return
        opened.open_count -= 1
        if opened.open_count <= 0:
            stream.open = None
        self._flush(stream, keep_chain=True)
        rank = stream.rank if opened.rank is None else opened.rank
        cause = classify(raised, stream.chain)
        stream.pending = ErrorReport(*cause, rank, self._position(host, line), stream.is_logged)
        stream.chain = (*stream.chain, raised)[-4:]
        stream.continued = 0

    def _continue(self, stream: _Stream, text: str) -> bool:
        """Read a line after an exception: more of its message, or the link to another one raised from it."""
        if text.startswith(_CHAIN):
            stream.pending = None
            stream.is_linked = True
            return True
        if not text.strip():
            return True
        pending = stream.pending
        if (
            pending is None
            or stream.continued >= _CONTINUATIONS
            or not _is_continuation(text, pending.exception.text)
        ):
            if stream.open is None or text[:1].isspace() is False:
                self._flush(stream)
            return False
        if stream.open is not None and text[:1].isspace():
            # A frame in the traceback of another rank.
            return False
        stream.continued += 1
        raised = dataclasses.replace(
            pending.exception, text=f"{pending.exception.text}\n{text}"[:_LINE_CHARACTERS]
        )
        rule, found, exception = classify(raised)
        if rule is not pending.rule and rule.is_general:
            rule = pending.rule
            found = pending.found
        stream.pending = dataclasses.replace(pending, rule=rule, found=found, exception=exception)
        return True

    def _flush(self, stream: _Stream, *, keep_chain: bool = False) -> None:
        if stream.pending is not None:
            self.errors.add(stream.pending)
            stream.pending = None
            stream.chain = ()
        elif not keep_chain:
            stream.chain = ()

    def _read_line(self, host: HostLog, line: LogLine, stream: _Stream, text: str) -> None:
        if (matched := first_line_match(text)) is not None:
            self._add_line(host, line, stream, text, *matched)
            return
        if text.startswith("Root Cause"):
            host.root_rank = -1
        elif host.root_rank == -1 and (match := _REPORT_RANK.match(text)):
            host.root_rank = int(match["rank"])
        if text and not _NOT_ORDINARY.match(text):
            host.lines += 1
            stream.previous = text
            self.last_lines.append(text)

    def _add_line(
        self,
        host: HostLog,
        line: LogLine,
        stream: _Stream,
        text: str,
        rule: Rule,
        found: dict[str, str],
    ) -> None:
        named = _NAMED_RANK.search(text)
        rank = int(named["rank"]) if named else stream.rank
        if rank is None and text.lstrip().startswith("traceback"):
            rank = host.reported_rank
        stream.previous = text
        self.errors.add(
            ErrorReport(
                rule=rule,
                found=found,
                exception=RaisedException(text.strip()),
                rank=rank,
                position=self._position(host, line),
            )
        )

    def _position(self, host: HostLog, line: LogLine) -> LogPosition:
        return LogPosition(
            host=line.host,
            time=line.received_time,
            order=self._order,
            lines=host.lines,
            progress=host.progress,
            step=host.step,
        )

    def _read_event(self, host: HostLog, line: LogLine, event: Event) -> None:
        host.clock = event.get("time", host.clock)
        if event["event"] in _PROGRESS_EVENTS:
            host.step = event.get("step", host.step)
            if event["event"] in ("started", "finished"):
                # If workers start again, or the run finishes, the job has survived all earlier errors.
                host.progress += ProgressTracker.PROGRESS
            else:
                host.progress += 1
            position = host.clock if line.received_time is None else line.received_time
            if position is not None:
                self.tracker.last_progress = max(self.tracker.last_progress or position, position)
        elif event["event"] == "failed":
            self._read_failed(host, line, event)
        elif event["event"] == "left":
            self._left.append((event, self._position(host, line)))

    def _read_failed(self, host: HostLog, line: LogLine, event: Event) -> None:
        """Read the launcher's report of the rank that failed first on its host."""
        rank = event.get("rank")
        failed_at = event.get("failed_at", event.get("time"))
        if host.failed_at is None:
            host.failed_at = failed_at
        message = event.get("message", "")
        failure = message.partition(" failed: ")[2]
        position = dataclasses.replace(
            self._position(host, line),
            time=host.failed_at if line.received_time is None else line.received_time,
        )
        if (matched := _match_message(failure, message)) is not None:
            self.errors.add(ErrorReport(*matched, rank, position))
        elif host.root_rank is None:
            host.root_rank = rank


def _is_continuation(text: str, message: str) -> bool:
    """Whether a line after an exception belongs to its message, whose first line may announce it by a colon."""
    if _CONTINUATION.match(text):
        return True
    is_announced = message.partition("\n")[0].endswith(":")
    return is_announced and not _NOT_ORDINARY.match(text) and first_line_match(text) is None


def _match_message(failure: str, message: str) -> Classified | None:
    """Return the rule for a launcher's message (`... failed: <failure>`), its groups and exception, or None."""
    raised = parse_exception(failure)
    if raised is not None:
        return classify(raised)
    matched = first_line_match(f"error: {failure}") or first_line_match(message)
    if matched is not None:
        return (*matched, RaisedException(failure or message))
    if not failure:
        return None
    return classify(RaisedException(failure))


def _clean(text: str) -> tuple[int | None, str]:
    """Return the rank in a line's prefix, and the line without prefix, colours and overwritten text."""
    text = text[:_LINE_CHARACTERS].rstrip()
    if "\r" in text:
        text = text.rpartition("\r")[2]
    if "\x1b" in text:
        text = _COLOUR.sub("", text)
    if text.startswith("("):
        text = _RAY_WORKER.sub("", text)
    if not text.startswith("["):
        return None, text
    return split_rank(text)
