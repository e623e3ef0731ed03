"""The last lines of a log, and after them the lines that follow."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from typing import TYPE_CHECKING

from cloudtrain.runs.log_lines import ALL_LINES, LogFilter, LogLine

if TYPE_CHECKING:
    from cloudtrain.runs.run import Run


def last_lines(
    run: Run,
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
