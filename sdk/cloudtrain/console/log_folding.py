"""The lines of a followed log for the eye: equal tracebacks of ranks once, frames of packages and equal hosts in one.

Nothing is lost: `logs` shows every line.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cloudtrain.console.terminal import visible_part
from cloudtrain.failure_rules.tracebacks import FRAME, LIBRARY
from cloudtrain.runs.event_words import describe_event, word_event, word_line
from cloudtrain.runs.log_lines import RANK_FAILED, LogLine, split_rank
from cloudtrain.support.notebook.summary import count, name_numbers
from cloudtrain_runtime.contract import parse_event
from cloudtrain_runtime.contract.hosts import sort_hosts

_HELD_SECONDS = 2.0
"""How long lines wait for equal ones of other hosts and ranks, and for the end of their traceback."""

_SAME_SECONDS = 60.0
"""Tracebacks of ranks that are further apart are not the same failure."""

_MOST_LINES = 500
"""Lines of a traceback; a longer one is shown as it comes."""

_MOST_TRACEBACKS = 50
_MOST_HOSTS = 3
_TRACEBACK = "Traceback (most recent call last):"
_CHAIN = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
_PACKAGE = re.compile(r"[/\\](?:site|dist)-packages[/\\](?P<name>[^/\\]+)")
_NOISE = "torch/distributed/run.py"
_NOISY = "master_addr is only used for static rdzv_backend"
"""What torchrun prints in each run, and where, although it says nothing about the run."""


class ShownLine(NamedTuple):
    """A line to show: the host or hosts that it comes from, and its text."""

    host: str
    text: str


_Rank = tuple[str, int | None]
"""Host and rank that print a line; the rank is None if it is unknown."""


@dataclass
class _Block:
    """The lines of a rank's traceback so far, or of what may connect its last traceback with the next one."""

    began_at: float
    is_traceback: bool
    lines: list[LogLine] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def add(self, line: LogLine, text: str) -> None:
        """Add a line, whose text is without the rank."""
        self.lines.append(line)
        self.texts.append(text)
        self.is_traceback |= text.startswith(_TRACEBACK)


class _Shown(NamedTuple):
    """A traceback that was shown: by which rank, and when."""

    texts: tuple[str, ...]
    rank: _Rank
    time: float


class LogFolder:
    """Folds the lines of a run while they arrive.

    Args:
        clock: Returns seconds of a clock that is never set back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._hosts: dict[str, dict[str, None]] = {}
        self._hosts_since = 0.0
        self._open: dict[_Rank, _Block] = {}
        self._shown: deque[_Shown] = deque(maxlen=_MOST_TRACEBACKS)
        self._equal: list[_Rank] = []
        self._equal_since = 0.0
        self._messages: dict[_Rank, str] = {}

    def fold(self, line: LogLine) -> Iterator[ShownLine]:
        """Yield what to show of a line, and of earlier ones that it completes."""
        event = parse_event(line.text)
        if event is not None and event["event"] == "environment":
            if not self._hosts:
                self._hosts_since = self._clock()
            self._hosts.setdefault(describe_event(event), {})[line.host] = None
            return
        yield from self._release_hosts()
        if event is not None:
            worded = word_event(event)
            if worded is not None:
                yield ShownLine(line.host, worded)
            return
        yield from self._fold_text(line)

    def due(self) -> Iterator[ShownLine]:
        """Yield the lines that have waited long enough."""
        latest = self._clock() - _HELD_SECONDS
        if self._hosts and self._hosts_since < latest:
            yield from self._release_hosts()
        for rank in [rank for rank, block in self._open.items() if block.began_at < latest]:
            yield from self._show(rank)
        if self._equal and self._equal_since < latest:
            yield from self._release_equal()

    def end(self) -> Iterator[ShownLine]:
        """Yield the lines that still wait, because the log has ended or is followed no longer."""
        yield from self._release_hosts()
        for rank in list(self._open):
            yield from self._show(rank)
        yield from self._release_equal()

    def _fold_text(self, line: LogLine) -> Iterator[ShownLine]:
        text = line.text
        if self._open or _TRACEBACK in text:
            number, rest = split_rank(text)
            rank = (line.host, number)
            block = self._open.get(rank)
            if rest.startswith(_TRACEBACK) and (block is None or block.is_traceback):
                yield from self._show(rank)
                block = self._open[rank] = _Block(self._clock(), is_traceback=True)
            if block is not None and _belongs(block, rest):
                block.add(line, rest)
                if block.is_traceback and _is_exception(rest):
                    yield from self._complete(rank)
                elif len(block.lines) >= _MOST_LINES:
                    yield from self._show(rank)
                return
            yield from self._show(rank)
        if (_NOISY in text and _NOISE in text) or self._is_repeated(text):
            return
        worded = word_line(text)
        if worded is not None:
            yield ShownLine(line.host, visible_part(worded))

    def _complete(self, rank: _Rank) -> Iterator[ShownLine]:
        """Show a whole traceback, unless another rank has just shown the same one."""
        block = self._open[rank]
        texts = tuple(block.texts)
        self._messages[rank] = texts[-1]
        if rank[1] is not None and self._is_shown(texts, rank):
            if not self._equal:
                self._equal_since = self._clock()
            self._equal.append(rank)
            del self._open[rank]
        else:
            yield from self._show(rank)
        self._shown.append(_Shown(texts, rank, self._clock()))
        # The next lines may connect it with another traceback.
        self._open[rank] = _Block(self._clock(), is_traceback=False)

    def _show(self, rank: _Rank) -> Iterator[ShownLine]:
        """Show the lines of a rank that wait."""
        block = self._open.pop(rank, None)
        if block is not None:
            texts = fold_frames([line.text for line in block.lines])
            yield from (ShownLine(rank[0], visible_part(text)) for text in texts)

    def _is_shown(self, texts: tuple[str, ...], rank: _Rank) -> bool:
        """Return whether another rank has just shown a traceback. One that a rank repeats is a new one."""
        same = [each for each in self._shown if each.texts == texts]
        if any(each.rank == rank for each in same):
            for each in same:
                self._shown.remove(each)
            return False
        earliest = self._clock() - _SAME_SECONDS
        return any(each.time > earliest for each in same)

    def _is_repeated(self, text: str) -> bool:
        """Return whether the launcher repeats the message of a traceback that was shown or named."""
        if not self._messages:
            return False
        match = RANK_FAILED.match(text)
        if match is None:
            return False
        rank = (match["host"], int(match["rank"]))
        return self._messages.get(rank) == text[match.end() :]

    def _release_hosts(self) -> Iterator[ShownLine]:
        for text, hosts in self._hosts.items():
            yield ShownLine(_name_hosts(hosts), text)
        self._hosts.clear()

    def _release_equal(self) -> Iterator[ShownLine]:
        if not self._equal:
            return
        ranks = sorted({number for _, number in self._equal if number is not None})
        hosts = _name_hosts(dict.fromkeys(host for host, _ in self._equal))
        plural = "s" if len(ranks) > 1 else ""
        yield ShownLine(hosts, f"the same traceback on rank{plural} {name_numbers(ranks)}")
        self._equal.clear()


def _belongs(block: _Block, text: str) -> bool:
    """Return whether a line continues the lines of a rank that wait."""
    if block.is_traceback:
        return True
    return not text or text in _CHAIN or text.startswith(_TRACEBACK)


def _is_exception(text: str) -> bool:
    """Return whether a line of a traceback is that of the exception, which ends it."""
    is_other = text in _CHAIN or text.startswith((" ", _TRACEBACK))
    return bool(text) and not is_other


def fold_frames(lines: Sequence[str]) -> Iterator[str]:
    """Yield the lines of a traceback, with consecutive frames of installed packages as one line."""
    frames = 0
    package = prefix = ""
    for text in lines:
        rest = split_rank(text)[1]
        frame = FRAME.match(rest)
        found = "" if frame is None else _package_of(frame["file"])
        if found:
            frames += 1
            package = found
            prefix = text[: len(text) - len(rest)]
            continue
        if frames and frame is None and rest.startswith("    "):
            # The source line of such a frame, and the marks below it.
            continue
        if frames:
            yield f"{prefix}  ... {count(frames, 'frame')} of {package}"
        frames = 0
        yield text
    if frames:
        yield f"{prefix}  ... {count(frames, 'frame')} of {package}"


def _package_of(file: str) -> str:
    """Return the installed package that a source file belongs to; an empty string for the job's own code."""
    found = _PACKAGE.search(file)
    if found is not None:
        return found["name"].removesuffix(".py")
    return "Python" if LIBRARY.search(file) else ""


def _name_hosts(hosts: Iterable[str]) -> str:
    """Return hosts as `algo-1, algo-2`; of more than three `algo-1, algo-2, algo-3 and 5 more`."""
    names = sort_hosts(list(hosts))
    if len(names) <= _MOST_HOSTS:
        return ", ".join(names)
    return f"{', '.join(names[:_MOST_HOSTS])} and {len(names) - _MOST_HOSTS} more"
