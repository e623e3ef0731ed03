"""Samples of the output of commands, for their pages in docs/reference/commands.

    PYTHONPATH=tests python -m support.command_samples                    record all again (`make samples`, minutes)

The commands run for real, on a pseudo-terminal of 80 columns and in a temporary folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import shlex
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Iterator
from pathlib import Path

from support.screen import Screen
from support.surroundings import OF_THE_TERMINAL

SAMPLES = Path(__file__).parents[2] / "docs" / "reference" / "samples"
_COLUMNS = 80
_MOST_LINES = 70
_HOME = "/home/you"
"""What samples show in place of the temporary folder."""
_SWEEP = """\
name: rates
job: my-job
space:
  train.learning_rate: {log_uniform: [1e-3, 1e-1]}
  code.args.width: {choice: [16, 32]}
objective: validation/loss
trials: 4
"""


def main() -> None:
    """Record every sample. The files are written at the end, so that a failure leaves the old ones."""
    samples = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, text in record(Path(folder).resolve()):
            samples[name] = text
            print(f"recorded: {name}", flush=True)
    SAMPLES.mkdir(exist_ok=True)
    for name, text in samples.items():
        (SAMPLES / f"{name}.txt").write_text(text, encoding="utf-8")


def record(home: Path) -> Iterator[tuple[str, str]]:
    """Yield the name and text of each sample, in the order of a user's first hour.

    Args:
        home: An empty folder.
    """
    work = home / "work"
    work.mkdir()

    def sample(line: str) -> tuple[str, str]:
        words = shlex.split(line)[1:]
        is_group = words[0] in ("sweep", "checkpoints") and len(words) > 1
        name = "-".join(words[: 2 if is_group else 1])
        return name, f"$ {line}\n{run(line, work, home)}\n"

    yield sample("cloudtrain doctor")
    yield sample("cloudtrain init my-job")
    yield sample("cloudtrain validate my-job")
    yield sample("cloudtrain files my-job")
    yield sample("cloudtrain plan my-job")
    yield sample("cloudtrain submit my-job --local --follow")
    yield sample("cloudtrain status")
    yield sample("cloudtrain metrics latest loss")
    yield sample("cloudtrain checkpoints")
    yield sample("cloudtrain logs --tail 10")
    yield sample("cloudtrain rehearse my-job")
    run("cloudtrain submit my-job --local --follow --set train.epochs=5", work, home)
    yield sample(f"cloudtrain compare {' '.join(_handles(work))}")
    run("cloudtrain init waves", work, home)
    task = work / "waves" / "task.py"
    task.write_text(task.read_text().replace("mse_loss(model(x), y)", "mse_loss(model(x), labels)"))
    run("cloudtrain submit waves --local --follow", work, home)
    yield sample("cloudtrain explain")
    yield sample("cloudtrain list")
    (work / "sweep.yaml").write_text(_SWEEP)
    yield sample("cloudtrain sweep plan --local")
    run("cloudtrain sweep run --local --follow", work, home)
    yield sample("cloudtrain sweep status")
    yield sample("cloudtrain sweep best")
    yield sample("cloudtrain configure --show")


def _handles(work: Path) -> list[str]:
    """Return the last characters of the ids of the local runs, the oldest first."""
    runs = sorted((work / ".cloudtrain" / "runs").iterdir(), key=lambda run: run.stat().st_mtime)
    return [run.name[-6:] for run in runs]


def run(line: str, folder: Path, home: Path) -> str:
    """Return what a terminal shows after a command, as a user with another home folder would see it."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, _COLUMNS, 0, 0))
    words = [str(Path(sys.executable).with_name("cloudtrain")), *shlex.split(line)[1:]]
    process = subprocess.Popen(
        words,
        cwd=folder,
        env=_environment(home),
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    written = b""
    # The terminal raises EIO after its last writer has closed it.
    with contextlib.suppress(OSError):
        while data := os.read(ours, 65536):
            written += data
    os.close(ours)
    process.wait()
    screen = Screen()
    screen.write(written.decode("utf-8", "replace"))
    text = "\n".join(_shortened(screen.lines()))
    return text.replace(str(home), _HOME).replace(sys.prefix, f"{_HOME}/.venv")


def _shortened(lines: list[str]) -> list[str]:
    if len(lines) <= _MOST_LINES:
        return lines
    half = _MOST_LINES // 2
    return [*lines[:half], "...", *lines[-half:]]


def _environment(home: Path) -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("CLOUDTRAIN_", "AWS_")) and name not in OF_THE_TERMINAL
    }
    return {
        **kept,
        "COLUMNS": str(_COLUMNS),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "TERM": "xterm-256color",
        "XDG_CONFIG_HOME": str(home / ".config"),
    }


if __name__ == "__main__":
    main()
