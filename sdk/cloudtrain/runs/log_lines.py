"""Log lines of a run, filters for them, and the last ones of a log."""

from __future__ import annotations

import dataclasses
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Protocol

from cloudtrain.errors import UserError
from cloudtrain.runs.event_words import describe_event
from cloudtrain.support.argument_types import check_type
from cloudtrain.support.units import parse_duration
from cloudtrain_runtime.contract import parse_event


@dataclass(frozen=True)
class LogLine:
    """One line of a run's log, without its newline.

    Attributes:
        host: Host that printed it, such as `algo-1`.
        text: The line.
        time: When the backend received it, in seconds since the epoch; None only for lines that no backend has read.
        raw: Its bytes if `text` differs from them: the line is not UTF-8, or ends with a carriage return.
        is_estimated: Whether the backend records no times. Then `time` is that of the line's event or timestamp, else
            the newest time that is known to be before the line.
    """

    host: str
    text: str
    time: float | None = None
    raw: bytes | None = None
    is_estimated: bool = False

    def __str__(self) -> str:
        """Return the host and the line, with an event as a sentence."""
        event = parse_event(self.text)
        return f"{self.host}  {self.text if event is None else describe_event(event)}"

    def __repr__(self) -> str:
        return f"<LogLine {str(self)!r}>"

    @property
    def received_time(self) -> float | None:
        """`time` if it is not estimated, else None: lines of different hosts can be ordered by it."""
        return None if self.is_estimated else self.time


_RANK_PREFIX = re.compile(
    # Our worker; torch's excepthook and C++ log, since 2.3.
    r"^\[(?:rank(?P<torch>\d+)\]:"
    # mpirun --tag-output, with and without SMDDP.
    r"|1,(?:mpirank:)?(?P<mpi>\d+)(?:,[\w-]+)?\]<std(?:err|out)>:"
    # torchrun --tee: role and local rank.
    r"|[a-z]+\d+\]:)"
    r" ?"
)
"""Prefixes with the rank of a line, by the program that adds them."""


RANK_FAILED = re.compile(r"^rank (?P<rank>\d+) on (?P<host>\S+) \(local rank \d+\) failed: ")
"""Begins the launcher's line about a rank that has failed; its exception follows."""


def find_rank(text: str) -> int | None:
    """Return the rank that printed a line, or None if it is unknown. Of a progress bar it is that of the last state.

    Rank 0 prints the event lines that name no other rank.
    """
    if (event := parse_event(text)) is not None:
        rank: int | None = event.get("rank", 0)
        return rank
    return split_rank(text.rstrip("\r").rpartition("\r")[2])[0]


def split_rank(text: str) -> tuple[int | None, str]:
    """Return the rank in a line's prefix, None if it is unknown, and the line without the prefix."""
    match = _RANK_PREFIX.match(text)
    if match is None:
        return None, text
    rank = match["torch"] or match["mpi"]
    return (int(rank) if rank else None), text[match.end() :]


TIME_HINT = "for example datetime.now(timezone.utc) - timedelta(days=3)"


@dataclass(frozen=True)
class LogFilter:
    """Selects log lines by all the given values.

    Attributes:
        host: Only lines of this host, such as `algo-1`.
        grep: Only lines in which this pattern is found.
        since: Only lines since this time (UTC without a zone), or of this last period by the backend's clock.
        rank: Only lines that this rank is known to have printed.
    """

    host: str | None = None
    grep: re.Pattern[str] | None = None
    since: datetime | timedelta | None = None
    rank: int | None = None

    def __post_init__(self) -> None:
        """Check the types of the values.

        Raises:
            UserError: A value has another type.
        """
        since: object = self.since
        grep: object = self.grep
        if since is not None and not isinstance(since, datetime | timedelta):
            raise UserError(f"since: expected a datetime or a timedelta, got {since!r}", TIME_HINT)
        if grep is not None and not isinstance(grep, re.Pattern):
            raise UserError(
                f"grep: expected a pattern, got {grep!r}", f"for example re.compile({grep!r})"
            )
        check_type("rank", self.rank, int)

    def wants(self, line: LogLine) -> bool:
        """Whether host, text and rank of a line match. Backends apply `since`, because they know the times."""
        return (
            (self.host is None or line.host == self.host)
            and (self.grep is None or self.grep.search(line.text) is not None)
            and (self.rank is None or find_rank(line.text) == self.rank)
        )

    def from_now(self) -> LogFilter:
        """Return the filter with an absolute time, so that repeated reads of a log start at the same line."""
        if not isinstance(self.since, timedelta):
            return self
        began = max(0.0, time.time() - self.since.total_seconds())
        return dataclasses.replace(self, since=datetime.fromtimestamp(began, UTC))

    def begins(self, now: float) -> float | None:
        """Return `since` in seconds since the epoch, or None. `now` is the present time of the lines' clock."""
        if self.since is None:
            return None
        if isinstance(self.since, timedelta):
            return now - self.since.total_seconds()
        zoned = self.since if self.since.tzinfo is not None else self.since.replace(tzinfo=UTC)
        return zoned.timestamp()


ALL_LINES = LogFilter()


def parse_since(text: str) -> datetime | timedelta:
    """Parse a duration such as `10m`, or a time such as `2026-11-20T10:00`, which is UTC without a zone.

    Raises:
        ValueError: the text is neither.
    """
    try:
        return timedelta(seconds=parse_duration(text))
    except (ValueError, OverflowError):
        pass
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        raise ValueError(
            f"expected a duration such as 10m or a time such as 2026-11-20T10:00, got {text!r}"
        ) from None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


class LogSource(Protocol):
    """A run, as far as its log is read: `Run`."""

    def logs(
        self,
        *,
        follow: bool = False,
        only: LogFilter = ALL_LINES,
        on_trouble: Callable[[str], None] | None = None,
    ) -> Iterator[LogLine]:
        """Yield the selected log lines of all hosts, each once; with `follow` until the run has ended."""
        ...


def last_lines(
    run: LogSource,
    count: int,
    *,
    follow: bool = False,
    only: LogFilter = ALL_LINES,
    on_trouble: Callable[[str], None] | None = None,
    is_shown: Callable[[LogLine], bool] = lambda _: True,
) -> Iterator[LogLine]:
    """Yield the last present lines of a run's log, and with `follow` then those that arrive.

    With `follow` the log is read twice, because a followed log does not show where its present part ends.

    Args:
        run: The run.
        count: Number of lines.
        follow: Continue until the run has ended.
        only: Filter of the lines; only lines that match are counted.
        on_trouble: Called with a message when an outage begins, and when it ends.
        is_shown: Whether the caller shows a line; others are not counted.

    Raises:
        CloudError: AWS refused or cannot be reached.
    """
    only = only.from_now()
    last: deque[LogLine] = deque(maxlen=count)
    present: Counter[Hashable] = Counter()
    for line in run.logs(only=only, on_trouble=on_trouble):
        if is_shown(line):
            last.append(line)
        if follow:
            present[_identity(line)] += 1
    yield from last
    if not follow:
        return
    for line in run.logs(follow=True, only=only, on_trouble=on_trouble):
        if present[_identity(line)] > 0:
            present[_identity(line)] -= 1
        else:
            yield line


def _identity(line: LogLine) -> Hashable:
    return hash((line.host, line.text, line.received_time))
