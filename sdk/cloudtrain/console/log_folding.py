"""The lines of a followed log for the eye: equal tracebacks of ranks once, frames of packages and equal hosts in one.

Nothing is lost: `logs` shows every line.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple

from cloudtrain.console.terminal import visible_part
from cloudtrain.runs.event_words import describe_event, word_line
from cloudtrain.runs.log_lines import LogLine, split_rank
from cloudtrain.support.notebook.summary import count
from cloudtrain_runtime.contract import parse_event
from cloudtrain_runtime.contract.hosts import sort_hosts

_HELD_SECONDS = 2.0
"""How long lines wait for equal ones of other hosts and ranks."""

_MOST_LINES = 500
"""Lines of a rank that are compared with those of the first rank that fails."""

_TRACEBACK = "Traceback (most recent call last):"
_FRAME = re.compile(r'^\s+File "(?P<file>[^"]+)", line \d+')
_PACKAGE = re.compile(r"[/\\](?:site|dist)-packages[/\\](?P<name>[^/\\]+)")
_STANDARD_LIBRARY = re.compile(r"[/\\]lib[/\\]python3\.\d+[/\\]")
_LAUNCHER = re.compile(r"rank \d+ on \S+ \(local rank \d+\) failed: (?P<message>.*)")


_NOISE = ("master_addr is only used for static rdzv_backend",)
"""Parts of lines that torchrun prints in each run and that say nothing about it."""


class ShownLine(NamedTuple):
    """A line to show: the host or hosts that it comes from, and its text."""

    host: str
    text: str


class LogFolder:
    """Folds the lines of a run while they arrive.

    Args:
        clock: Returns seconds of a clock that is never set back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._hosts = _EqualHosts()
        self._ranks = _EqualRanks()
        self._frames = _Frames()
        self._held_since: float | None = None

    def fold(self, line: LogLine) -> Iterator[ShownLine]:
        """Yield what to show of a line, and of earlier ones that it completes."""
        if any(noise in line.text for noise in _NOISE):
            return
        event = parse_event(line.text)
        if event is not None and event["event"] == "environment":
            self._hosts.add(line.host, describe_event(event))
            self._hold()
            return
        yield from self._hosts.release()
        for each in self._ranks.add(line):
            yield from self._shown(each)
        if self._ranks.is_holding:
            self._hold()

    def due(self) -> Iterator[ShownLine]:
        """Yield the lines that have waited long enough."""
        if self._held_since is None or self._clock() - self._held_since < _HELD_SECONDS:
            return
        self._held_since = None
        yield from self._hosts.release()
        for each in self._ranks.release_complete():
            yield from self._shown(each)
        if self._ranks.is_holding:
            self._hold()

    def end(self) -> Iterator[ShownLine]:
        """Yield the lines that still wait, because the log has ended."""
        self._held_since = None
        yield from self._hosts.release()
        for each in self._ranks.release():
            yield from self._shown(each)

    def _hold(self) -> None:
        if self._held_since is None:
            self._held_since = self._clock()

    def _shown(self, line: ShownLine) -> Iterator[ShownLine]:
        for text in self._frames.fold(line.text):
            worded = word_line(text)
            if worded is not None:
                yield ShownLine(line.host, visible_part(worded))


class _EqualHosts:
    """What hosts have, which is equal for most."""

    def __init__(self) -> None:
        self._hosts_by_text: dict[str, list[str]] = {}

    def add(self, host: str, text: str) -> None:
        self._hosts_by_text.setdefault(text, []).append(host)

    def release(self) -> Iterator[ShownLine]:
        for text, hosts in self._hosts_by_text.items():
            yield ShownLine(_name_hosts(hosts), text)
        self._hosts_by_text.clear()


class _EqualRanks:
    """The tracebacks of ranks. Those of later ranks wait, and are shown when they differ from the first one's."""

    def __init__(self) -> None:
        self._first: tuple[str, int] | None = None
        self._lines: list[str] = []
        self._waiting: dict[tuple[str, int], list[LogLine]] = {}
        self._different: set[tuple[str, int]] = set()

    @property
    def is_holding(self) -> bool:
        return bool(self._waiting)

    def add(self, line: LogLine) -> Iterator[ShownLine]:
        """Yield the lines to show now."""
        rank, text = split_rank(line.text)
        if rank is None:
            if not self._is_repeated(text):
                yield ShownLine(line.host, line.text)
            return
        key = (line.host, rank)
        begins = text.startswith(_TRACEBACK)
        if self._first is None and begins:
            self._first = key
        if key == self._first:
            if len(self._lines) < _MOST_LINES:
                self._lines.append(text)
            yield ShownLine(line.host, line.text)
        elif key not in self._different and (begins or key in self._waiting):
            self._waiting.setdefault(key, []).append(line)
        else:
            yield ShownLine(line.host, line.text)
        for each in list(self._waiting):
            yield from self._compare(each)

    def release_complete(self) -> Iterator[ShownLine]:
        """Yield who has had the whole traceback, too."""
        complete = [key for key, lines in self._waiting.items() if len(lines) == len(self._lines)]
        yield from self._name(complete)
        for key in complete:
            del self._waiting[key]
            self._different.add(key)

    def release(self) -> Iterator[ShownLine]:
        """Yield who has had the same traceback, whole or cut off."""
        yield from self._name(self._waiting)
        self._waiting = {}

    def _name(self, keys: Collection[tuple[str, int]]) -> Iterator[ShownLine]:
        if not keys:
            return
        ranks = sorted(rank for _, rank in keys)
        hosts = sorted({host for host, _ in keys})
        named = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        yield ShownLine(_name_hosts(hosts), f"the same traceback on {named}")

    def _compare(self, key: tuple[str, int]) -> Iterator[ShownLine]:
        """Yield the lines of a rank that differ from those of the first rank."""
        lines = self._waiting[key]
        texts = [split_rank(line.text)[1] for line in lines]
        is_equal = all(mine == first for mine, first in zip(texts, self._lines, strict=False))
        if is_equal and len(texts) <= _MOST_LINES:
            return
        del self._waiting[key]
        self._different.add(key)
        for line in lines:
            yield ShownLine(line.host, line.text)

    def _is_repeated(self, text: str) -> bool:
        """Return whether the launcher repeats the message of a traceback that was shown."""
        match = _LAUNCHER.fullmatch(text)
        return match is not None and match["message"] in self._lines


class _Frames:
    """Frames of installed packages in a traceback, which become one line."""

    def __init__(self) -> None:
        self._count = 0
        self._package = ""
        self._prefix = ""

    def fold(self, text: str) -> Iterable[str]:
        """Return the lines to show: none for such a frame, and its number before the line that follows."""
        rest = split_rank(text)[1]
        prefix = text[: len(text) - len(rest)]
        frame = _FRAME.match(rest)
        package = "" if frame is None else _package_of(frame["file"])
        if package:
            self._count += 1
            self._package = package
            self._prefix = prefix
            return ()
        is_source = frame is None and rest.startswith("    ")
        if self._count and is_source:
            return ()
        if not self._count:
            return (text,)
        summary = f"{self._prefix}  ... {count(self._count, 'frame')} of {self._package}"
        self._count = 0
        return (summary, text)


def _package_of(file: str) -> str:
    """Return the installed package that a source file belongs to; an empty string for the job's own code."""
    found = _PACKAGE.search(file)
    if found is not None:
        return found["name"].removesuffix(".py")
    return "Python" if _STANDARD_LIBRARY.search(file) or file.startswith("<frozen ") else ""


def _name_hosts(hosts: list[str]) -> str:
    """Return hosts as `algo-1, algo-2`, or `algo-1 to algo-16` for more than three."""
    names = sort_hosts(hosts)
    if len(names) <= 3:  # noqa: PLR2004 (more would leave no room for the text)
        return ", ".join(names)
    return f"{names[0]} to {names[-1]}"
