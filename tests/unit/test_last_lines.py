"""The last lines of a log, and the lines after them."""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.jobs import Cli

from cloudtrain.backends.container.state_file import RecordedState, write_state
from cloudtrain.backends.local.backend import LocalBackend
from cloudtrain.runs.log_lines import LogFilter, last_lines
from cloudtrain.runs.run import Run
from cloudtrain.runs.status import State

RUN = "digits-261120-101500-1a2b3c"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a run that has ended, with six lines of which two are equal; return its folder."""
    folder = tmp_path / "runs-home" / "runs" / RUN
    (folder / "logs").mkdir(parents=True)
    write_state(folder, RecordedState(State.SUCCEEDED))
    (folder / "logs" / "algo-1.log").write_text("one\nsame\ntwo\nsame\nthree\nfour\n")
    return folder


@pytest.fixture
def lock(folder: Path) -> Iterator[None]:
    """Make the run active: hold the lock of its supervisor."""
    write_state(folder, RecordedState(State.RUNNING, supervisor=os.getpid()))
    with (folder / "supervisor.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def test_tail_prints_the_last_matching_lines(folder: Path, cli: Cli) -> None:
    assert cli("logs", RUN, "--tail", "2").out.split() == ["algo-1", "three", "algo-1", "four"]
    assert [
        line["text"]
        for line in cli("logs", RUN, "--tail", "1", "--grep", "^t", "--json").json["lines"]
    ] == ["three"]
    assert len(cli("logs", RUN, "--tail", "99").out.splitlines()) == 6
    assert cli("logs", RUN, "--tail", "2", "-f").out == cli("logs", RUN, "--tail", "2").out
    refused = cli("logs", RUN, "--tail", "0")
    assert (refused.code, "--tail" in refused.err) == (2, True)


def test_tail_counts_only_lines_that_are_shown(folder: Path, cli: Cli) -> None:
    event = {
        "event": "outputs",
        "host": "algo-1",
        "model_is_empty": False,
        "unkept_files": 0,
        "unkept_bytes": 0,
    }
    hidden = f"CLOUDTRAIN {json.dumps({**event, 'unkept': []})}\n"
    with (folder / "logs" / "algo-1.log").open("a") as file:
        file.write(hidden * 3)
    assert cli("logs", RUN, "--tail", "2").out.split() == ["algo-1", "three", "algo-1", "four"]
    assert cli("logs", RUN, "--tail", "2", "-f").out.split() == [
        "algo-1",
        "three",
        "algo-1",
        "four",
    ]
    assert cli("logs", RUN, "--tail", "2", "--raw").out.count("CLOUDTRAIN") == 2
    assert len(cli("logs", RUN, "--tail", "4", "--json").json["lines"]) == 4


@pytest.mark.usefixtures("lock")
def test_followed_lines_come_once_after_the_last(folder: Path) -> None:
    log = folder / "logs" / "algo-1.log"
    lines = last_lines(
        Run(RUN, LocalBackend(folder.parents[1])),
        2,
        follow=True,
        only=LogFilter(grep=re.compile(".")),
    )
    assert [next(lines).text for _ in range(2)] == ["three", "four"]
    with log.open("a") as file:
        file.write("same\nfive\n")
    write_state(folder, RecordedState(State.SUCCEEDED))
    assert [line.text for line in lines] == ["same", "five"]


@pytest.mark.usefixtures("lock")
def test_an_incomplete_last_line_comes_again_in_full(folder: Path) -> None:
    log = folder / "logs" / "algo-1.log"
    log.write_text("one\nfi")
    lines = last_lines(Run(RUN, LocalBackend(folder.parents[1])), 1, follow=True)
    assert next(lines).text == "fi"
    with log.open("a") as file:
        file.write("ve\n")
    write_state(folder, RecordedState(State.SUCCEEDED))
    assert [line.text for line in lines] == ["five"]
