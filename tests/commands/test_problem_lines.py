"""Every command that reads a job shows the wrong line of its file on a terminal."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from support.jobs import Terminal, command

WriteJob = Callable[..., Path]


@pytest.mark.parametrize("words", ["validate", "plan", "submit --local", "rehearse"])
def test_a_problem_is_shown_with_its_line(words: str, job: WriteJob) -> None:
    path = job("name: demo\ncode: {task: 'mine:Mine'}\ntrain:\n  epochs: three\n", mine_py="")
    name, *options = words.split()
    terminal = Terminal(
        [str(command()), name, str(path), *options], {**os.environ, "TERM": "xterm"}, 200
    )
    assert terminal.end() == 2
    assert "  4 |   epochs: three    |           ^^^^^" in terminal.text
