"""Completion in a real bash, as the Tab key does it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from support.jobs import Cli, Terminal, command, until

from cloudtrain.backends.container.state_file import RecordedState, write_state
from cloudtrain.runs.known_runs import record_run
from cloudtrain.runs.status import State
from cloudtrain.support.run_id import make_run_id

NOW = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)
Complete = Callable[[str, str], None]
SHELLS = ("bash", "zsh", "fish")


@pytest.fixture
def runs(tmp_path: Path) -> tuple[str, str]:
    """Write a local run and record one of SageMaker; return their ids."""
    local, remote = make_run_id("digits", NOW, "1a2b3c"), make_run_id("mnist", NOW, "2a2b3c")
    (folder := tmp_path / "runs-home" / "runs" / local).mkdir(parents=True)
    write_state(folder, RecordedState(State.SUCCEEDED))
    record_run(os.environ, f"sagemaker:{remote}", tmp_path)
    return local, remote


@pytest.fixture
def complete(tmp_path: Path, cli: Cli) -> Iterator[Complete]:
    """Return a function that types a text and Tab in bash, and waits for the completed line."""
    (tmp_path / "completion.sh").write_text(cli("completion", "bash").out)
    environment = {**os.environ, "PATH": f"{command().parent}:{os.environ['PATH']}", "PS1": "$ "}
    bash = Terminal(["/bin/bash", "--norc", "--noprofile", "-i"], environment, columns=400)
    bash.press(
        f". {tmp_path}/completion.sh; cd {tmp_path}; bind 'set bell-style none'; echo rea''dy\n".encode()
    )
    until(lambda: bash.shows("ready"))

    def press_tab(typed: str, completed: str) -> None:
        bash.written = b""
        bash.press(typed.encode() + b"\t|")  # the bar shows whether a space was added
        until(lambda: bash.shows(f"{completed}|"))
        bash.press(b"\x15")  # clear the line

    yield press_tab
    bash.press(b"\x15exit\n")
    bash.end()


def test_commands_and_options_are_completed(complete: Complete) -> None:
    complete("cloudtrain stat", "cloudtrain status ")
    complete("cloudtrain checkpoints exp", "cloudtrain checkpoints export ")
    complete("cloudtrain logs --fol", "cloudtrain logs --follow ")
    complete("cloudtrain init --template acc", "cloudtrain init --template accelerate ")
    complete("cloudtrain nothing --j", "cloudtrain nothing --j")


def test_runs_are_completed(runs: tuple[str, str], complete: Complete) -> None:
    local, remote = runs
    complete("cloudtrain status lat", "cloudtrain status latest ")
    complete("cloudtrain status digits-", f"cloudtrain status {local} ")
    complete("cloudtrain logs --tail 3 mnist-", f"cloudtrain logs --tail 3 {remote} ")
    complete("cloudtrain checkpoints digits-", f"cloudtrain checkpoints {local} ")
    complete("cloudtrain checkpoints verify digits-", f"cloudtrain checkpoints verify {local} ")


def test_files_and_fields_of_the_job_are_completed(complete: Complete, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("")
    complete("cloudtrain plan mi", "cloudtrain plan mine.yaml ")
    complete("cloudtrain plan --set train.epo", "cloudtrain plan --set train.epochs=")
    complete(
        "cloudtrain resume latest --set cluster.sp", "cloudtrain resume latest --set cluster.spot"
    )
    complete("cloudtrain submit --local --set chec", "cloudtrain submit --local --set checkpoint.")


@pytest.mark.parametrize("shell", SHELLS)
def test_every_script_asks_the_command(shell: str, cli: Cli) -> None:
    done = cli("completion", shell)
    assert (done.code, done.err, f"_CLOUDTRAIN_COMPLETE={shell}_complete" in done.out) == (
        0,
        "",
        True,
    )
    variables = {
        "_CLOUDTRAIN_COMPLETE": f"{shell}_complete",
        "COMP_WORDS": "cloudtrain expl",
        "COMP_CWORD": "1",
    }
    asked = cli(environ=variables | ({"COMP_CWORD": "expl"} if shell == "fish" else {}))
    assert (asked.code, asked.err, "explain" in asked.out) == (0, "", True)


def test_an_unknown_shell_names_the_others(cli: Cli) -> None:
    done = cli("completion", "tcsh")
    assert (done.code, [shell for shell in SHELLS if shell in done.err]) == (2, [*SHELLS])
