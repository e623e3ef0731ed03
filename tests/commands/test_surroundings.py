"""Commands with closed or full output, missing folders, odd files, and Ctrl-C at any moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.jobs import EXAMPLES, Cli, command

JOB = EXAMPLES / "script-ddp" / "job.yaml"
PLAN = ("plan", str(JOB), "--local")


def in_shell(line: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a shell line in which `cloudtrain` is the installed command."""
    path = f"{command().parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["/bin/sh", "-c", line], env={**os.environ, "PATH": path, **environ}, capture_output=True, text=True,
        check=False, timeout=300,
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    assert "Exception ignored" not in done.stderr, done.stderr
    return done


@pytest.mark.parametrize(
    "words", ["list", f"plan {JOB} --local", f"plan {JOB} --local --json", "status x", "--help"]
)
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_error(words: str, closed: str) -> None:
    assert in_shell(f"cloudtrain {words} {closed}").returncode == (2 if words == "status x" else 0)


@pytest.mark.parametrize(
    "words", ["list", f"plan {JOB} --local", f"plan {JOB} --local --json", "schema"]
)
def test_a_full_output_device_is_reported_once(words: str) -> None:
    done = in_shell(f"cloudtrain {words} > /dev/full")
    assert done.returncode == 2
    assert (
        done.stderr.count("error: the output or a file cannot be written: No space left on device")
        == 1
    )


def test_a_closed_pipe_is_no_error() -> None:
    assert in_shell("cloudtrain schema | head -1").stderr == ""


@pytest.mark.parametrize(
    "words", ["list", "plan job.yaml", "submit job.yaml --local", "status x", "unknown --help"]
)
def test_a_deleted_working_directory_is_a_user_error(tmp_path: Path, words: str) -> None:
    (tmp_path / "gone").mkdir()
    environ = {name: value for name, value in os.environ.items() if name != "CLOUDTRAIN_HOME"}
    line = f"cd {tmp_path}/gone && rmdir {tmp_path}/gone && {command()} {words}"
    done = subprocess.run(
        ["/bin/sh", "-c", line], env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_the_deleted_working_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    environ = {name: value for name, value in os.environ.items() if name != "CLOUDTRAIN_HOME"}
    line = f"cd {tmp_path}/gone && rmdir {tmp_path}/gone && {command()} list"
    done = subprocess.run(
        ["/bin/sh", "-c", line], env=environ, capture_output=True, text=True, check=False
    )
    assert (
        done.stderr
        == "error: the working directory was deleted\n  change to a directory that exists\n"
    )


def test_a_home_that_is_a_device_is_a_user_error(cli: Cli) -> None:
    environ = {"CLOUDTRAIN_HOME": "/dev/null"}
    assert cli("list", environ=environ).code == 0
    for words in (
        ["status", "x-261120-101500-1a2b3c"],
        ["submit", JOB, "--local"],
        ["stop", "x-261120-101500-1a2b3c"],
    ):
        done = cli(*words, environ=environ)
        assert done.code == 2
        assert "/dev/null" in done.err
        assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('name: ok\ncode: {script: train.py, args: ["\\ud800"]}\n', "2:33  code.args[0]: "),
        ('name: ok\ncode: {script: train.py, env: {A: "\\udfff"}}\n', "2:35  code.env.A: "),
        ('name: ok\ncode: {script: train.py}\ntags: {"x\\ud800": y}\n', "3:8  tags: "),
        ('name: "a\\ud800"\ncode: {script: train.py}\n', "1:7  name: "),
        ('name: ok\ncode: {script: "\\ud800.py"}\n', "2:16  code.script: "),
    ],
)
@pytest.mark.parametrize("words", [("validate",), ("plan", "--local"), ("submit", "--local")])
def test_a_lone_surrogate_in_a_job_is_rejected_with_its_line(
    cli: Cli, tmp_path: Path, text: str, place: str, words: tuple[str, ...]
) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "job.yaml").write_text(text + "cluster: {instance_type: ml.m5.large}\n")
    done = cli(*words, tmp_path / "job.yaml")
    assert done.code == 2
    assert "a lone surrogate" in done.err
    assert f"job.yaml:{place}" in done.err


def test_an_override_that_is_not_utf_8_is_rejected(cli: Cli) -> None:
    done = cli(*PLAN, "--set", "name=\udcff")
    assert (done.code, "not UTF-8 text" in done.err) == (2, True)


def test_pipes_and_devices_are_rejected_as_job_files(cli: Cli, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    for name in (tmp_path / "pipe.yaml", "/dev/zero", "/dev/tty"):
        for words in (("validate",), ("plan", "--local")):
            done = cli(*words, name)
            assert done.code == 2
            assert "Traceback" not in done.err
            assert f"{name}: cannot be read: " in done.err
    (tmp_path / "long.yaml").write_bytes(b" " * 1_000_001)
    assert (
        "file of 1000001 bytes; a job file has at most 1000000"
        in cli("validate", tmp_path / "long.yaml").err
    )


INTERRUPT = """\
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Finder())
sys.argv = ["cloudtrain", "list"]
from cloudtrain.__main__ import main
main()
"""


@pytest.mark.parametrize(
    "name",
    [
        "cloudtrain.cli",
        "click",
        "cloudtrain.console",
        "cloudtrain.errors",
        "cloudtrain.cli.runs",
        "cloudtrain.client.client",
    ],
)
def test_ctrl_c_during_imports_leaves_no_traceback(name: str) -> None:
    line = [sys.executable, "-c", INTERRUPT.format(name=name)]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 130
    assert "Traceback" not in done.stderr
    assert "KeyboardInterrupt" not in done.stderr


def test_ctrl_c_at_start_leaves_no_traceback() -> None:
    """Before the first line of cloudtrain runs, Python's default handler ends the process."""
    process = subprocess.Popen(
        [str(command()), "list"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert process.returncode in (0, 1, 130, -signal.SIGINT)
    assert "cloudtrain/cli" not in errors
