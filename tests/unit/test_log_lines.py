"""Logs and events are read in bounded memory, and only their new parts."""

from __future__ import annotations

import contextlib
import functools
import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloudtrain.backends.container.event_tail import SUMMARY_FILE, EventTail
from cloudtrain.backends.container.job_folder import JobFolder
from cloudtrain.backends.container.log_lines import LINE_BYTES, LineTail
from cloudtrain.backends.container.state_file import RecordedState, write_state
from cloudtrain.backends.local.backend import LocalBackend
from cloudtrain.runs.progress import Progress, fold_events
from cloudtrain.runs.run import Run
from cloudtrain.runs.status import State

RUN = "long-261120-101500-1a2b3c"
LONG_BYTES = 300_000_000
NOTE = b" [cloudtrain: line truncated, %d bytes omitted]"


@contextlib.contextmanager
def memory_below(most_bytes: int) -> Iterator[None]:
    """Fail if Python objects need more memory at any time in the block."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most_bytes
    finally:
        tracemalloc.stop()


@pytest.fixture
def folder(tmp_path: Path) -> JobFolder:
    """Create a run whose log has a line of 300 MB in a sparse file, and an event after it."""
    folder = JobFolder(tmp_path / "runs" / RUN)
    folder.logs.mkdir(parents=True)
    write_state(folder.root, RecordedState(State.SUCCEEDED))
    with folder.log("algo-1").open("wb") as log:
        log.write(b"first\n")
        log.truncate(LONG_BYTES)
        log.seek(0, 2)
        log.write(b'\nCLOUDTRAIN {"event": "step", "step": 7}\nlast')
    return folder


def test_a_line_of_300_mb_is_cut_with_a_note(folder: JobFolder) -> None:
    with memory_below(16 * LINE_BYTES):
        lines = [line.text for line in Run(RUN, LocalBackend(folder.root.parents[1])).logs()]
    assert [lines[0], *lines[2:]] == ["first", 'CLOUDTRAIN {"event": "step", "step": 7}', "last"]
    assert lines[1].endswith((NOTE % (LONG_BYTES - 6 - LINE_BYTES)).decode())


def test_events_after_a_long_line_are_found_in_little_memory(folder: JobFolder) -> None:
    with memory_below(8 * LINE_BYTES):
        tail = EventTail({"algo-1": folder.log("algo-1")}, folder.events)
        tail.read()
        tail.close()
    assert folder.events.read_text() == '{"event": "step", "step": 7}\n'


def test_memory_does_not_grow_with_the_number_of_events(folder: JobFolder) -> None:
    kinds = ("step", "evaluation", "checkpoint", "phase", "failed")
    with folder.log("algo-1").open("w") as log:
        for kind in kinds:
            for _ in range(3000):
                print(
                    f'CLOUDTRAIN {{"event": "{kind}", "step": 1, "uri": "u", "time": 1}}', file=log
                )
    tail = EventTail({"algo-1": folder.log("algo-1")}, folder.events)
    tail.read()
    tail.close()
    assert {event["event"] for event in tail.seen} == {"failed"}
    assert len(tail.seen) <= 1000


@given(st.lists(st.binary(max_size=40), max_size=12))
def test_lines_are_those_of_the_file(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes]
) -> None:
    path = tmp_path_factory.mktemp("lines") / "log"
    tail = LineTail(path)
    found: list[bytes] = list(tail.read())
    with path.open("ab", buffering=0) as log:
        for piece in pieces:
            log.write(piece)
            found += tail.read()
            assert path.read_bytes()[: tail.offset].count(b"\n") == len(found)
    found += tail.read(final=True)
    tail.close()
    expected = b"".join(pieces).split(b"\n")
    assert found == (expected if expected[-1] else expected[:-1])


def write_events(path: Path, steps: range, mode: str = "a") -> None:
    with path.open(mode) as events:
        events.writelines(
            json.dumps({"event": "step", "step": step, "loss": 1.0}) + "\n" for step in steps
        )


def test_a_later_status_reads_only_new_events(folder: JobFolder) -> None:
    backend = LocalBackend(folder.root.parents[1])
    write_events(folder.events, range(1, 11))
    assert backend.status(RUN).progress.last_step == 10
    # Overwrite the events that were read: reading them again would lose the step.
    folder.events.write_bytes(b"x" * folder.events.stat().st_size)
    with folder.events.open("a") as events:
        events.write('{"event": "evaluation", "split": "test", "loss": 2.0}\n{"event": "step", "st')
    progress = backend.status(RUN).progress
    assert (progress.last_step, dict(progress.metrics)) == (
        10,
        {"train/loss": 1.0, "test/loss": 2.0},
    )
    with folder.events.open("a") as events:
        events.write('ep": 11}\n')
    assert backend.status(RUN).progress.last_step == 11
    write_events(folder.events, range(1, 3), mode="w")  # written anew
    assert backend.status(RUN).progress.last_step == 2


def test_a_long_run_has_a_summary_of_its_events(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path / "runs" / RUN)
    folder.logs.mkdir(parents=True)
    write_state(folder.root, RecordedState(State.SUCCEEDED))
    with folder.log("algo-1").open("w") as log:
        log.write(
            'CLOUDTRAIN {"event": "started", "total_steps": 40000, "world_size": 2, "step": 0}\n'
        )
        log.writelines(
            f'CLOUDTRAIN {{"event": "step", "step": {step}, "loss": 0.5}}\n'
            for step in range(1, 40_001)
        )
        log.write(
            'CLOUDTRAIN {"event": "checkpoint", "step": 40000, "uri": "file:///c", "time": 3.0}\n'
        )
    tail = EventTail({"algo-1": folder.log("algo-1")}, folder.events)
    tail.read()
    tail.close()
    expected = fold_events(map(json.loads, folder.events.read_text().splitlines()))
    # Overwrite the events that the summary covers: reading them would lose the progress.
    covered = folder.events.stat().st_size
    folder.events.write_bytes(b"x" * (covered - 1) + b"\n")
    assert LocalBackend(folder.root.parents[1]).status(RUN).progress == expected
    write_events(folder.events, range(40_001, 40_002))
    assert LocalBackend(folder.root.parents[1]).status(RUN).progress.last_step == 40_001


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"size_bytes": "all"}', '{"size_bytes": 9, "version": 2, "progress": {}}'],
)
def test_an_unusable_summary_is_ignored(folder: JobFolder, text: str) -> None:
    write_events(folder.events, range(1, 4))
    folder.events.with_name(SUMMARY_FILE).write_text(text)
    assert LocalBackend(folder.root.parents[1]).status(RUN).progress.last_step == 3


def test_events_fold_alike_at_once_and_one_by_one() -> None:
    events: list[dict[str, Any]] = [{"event": "started", "total_steps": 900, "world_size": 2}]
    for step in range(300):
        extra = {"mfu": 0.4} if step == 7 else {"split": {"data": step / 10}}
        events.append(
            {
                "event": "step",
                "step": step,
                "epoch": step // 90,
                "loss": None,
                "time": 3.0 * step,
                **extra,
            }
        )
        if step % 50 == 0:
            events.append(
                {
                    "event": "checkpoint",
                    "step": step,
                    "uri": f"file:///c/{step}",
                    "time": 3.0 * step,
                }
            )
    one_by_one = functools.reduce(
        lambda progress, event: fold_events([event], progress), events, Progress()
    )
    assert fold_events(events) == one_by_one
    assert one_by_one.metrics["train/mfu"] == 0.4


def test_a_reported_learning_rate_is_a_metric_of_the_status() -> None:
    """A Task's own learning rate is in the history only; a script's is one of its metrics."""
    of_a_task = {"event": "step", "step": 1, "loss": 0.5, "learning_rate": 0.1}
    of_a_script = {"event": "step", "step": 1, "loss": 0.5, "metrics": {"learning_rate": 0.2}}
    assert dict(fold_events([of_a_task]).metrics) == {"train/loss": 0.5}
    assert dict(fold_events([of_a_script]).metrics) == {
        "train/loss": 0.5,
        "train/learning_rate": 0.2,
    }
