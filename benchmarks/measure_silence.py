"""Measure for how long each command shows nothing on a terminal.

    .venv/bin/python benchmarks/measure_silence.py [--only submit list] [--seconds 2] [--write FILE]

Each command runs on a pseudo-terminal of 80 columns with a small job, the digits example, on this machine. Every output
counts, also a line that is written again. A command that serves until it is interrupted is measured until it has
printed its address. `--install` installs `--package` from pip's index.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import shutil
import signal
import struct
import tempfile
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from measure import BIN, REPOSITORY, Benchmark, Session, clean_environ, markdown_table

EXAMPLE = REPOSITORY / "examples" / "digits"
INSTALLING = """\
name: installing
code: {script: train.py, requirements: requirements.txt}
cluster: {instance_type: ml.m5.large, processes_per_instance: 1}
"""
SWEEP = """\
name: sweep-digits
job: job.yaml
space:
  train.learning_rate: {log_uniform: [1e-4, 3e-2]}
objective: validation/accuracy
trials: 2
parallel: 2
"""
_LIMIT_SECONDS = 900.0
BENCHMARK = Benchmark(
    __file__,
    __doc__,
    peers="nothing: these are times of this command line alone",
    goal="no command is silent for more than 2 s",
    mechanism="the command has written to its terminal",
    rounds=0,
    options={
        "only": (("",), "commands that are measured, by the beginning of their name"),
        "seconds": (2.0, "longest silence that is no fault"),
        "package": ("faker", "package that `submit --install` installs"),
    },
)


@dataclass(frozen=True)
class Command:
    """A command line that is measured.

    Attributes:
        words: Its words.
        codes: Its legal exit codes.
        until: A pattern of its output after which it is interrupted; empty for a command that ends by itself.
    """

    words: str
    codes: tuple[int, ...] = (0,)
    until: str = ""


COMMANDS = (
    Command("validate job.yaml --local"),
    Command("plan job.yaml --local"),
    Command("files job.yaml"),
    Command("submit installing.yaml --local --install"),
    Command("submit job.yaml --local --follow"),
    Command("resume latest --set train.epochs=3 --follow"),
    Command("submit long.yaml --local"),
    Command("stop latest", codes=(0, 5)),
    Command("submit failing.yaml --local --follow", codes=(4,)),
    Command("explain latest"),
    Command("status digits"),
    Command("logs digits"),
    Command("metrics digits"),
    Command("follow digits"),
    Command("list"),
    Command("compare digits installing"),
    Command("checkpoints list digits"),
    Command("checkpoints verify digits"),
    Command("checkpoints export digits --to safetensors -o weights.safetensors"),
    Command("download digits --to here"),
    Command("evaluate digits --wait"),
    Command("report digits"),
    Command("card digits"),
    Command("sweep plan sweep.yaml --local"),
    Command("sweep run sweep.yaml --local --follow"),
    Command("sweep status"),
    Command("rehearse job.yaml --minutes 5", codes=(0, 4)),
    # 2: without Ray.
    Command("serve digits", codes=(0, 2), until="http://"),
    Command("dashboard --port 0", until="http://"),
    Command("sandbox", until="endpoint"),
    Command("doctor", codes=(0, 3)),
    Command("rm digits --yes", codes=(0, 2)),
)


@dataclass(frozen=True)
class Silence:
    """How long a command took and was silent.

    Attributes:
        seconds: From its start to its end, or to its address.
        longest: The longest time without output.
        since: The second at which it began.
        last: The last line before it.
    """

    seconds: float
    longest: float
    since: float
    last: str


def make_jobs(folder: Path, package: str) -> None:
    """Write the jobs and the sweep into a folder."""
    shutil.copytree(EXAMPLE, folder, dirs_exist_ok=True)
    text = (EXAMPLE / "job.yaml").read_text()
    (folder / "job.yaml").write_text(text.replace("epochs: 12", "epochs: 2"))
    long = text.replace("epochs: 12", "epochs: 5000").replace("name: digits", "name: long")
    (folder / "long.yaml").write_text(long)
    failing = text.replace("name: digits", "name: failing").replace("digits:Digits", "fails:Digits")
    (folder / "failing.yaml").write_text(failing)
    (folder / "fails.py").write_text("from digits import Digits\n\nDigits.training_step = None\n")
    (folder / "installing.yaml").write_text(INSTALLING)
    (folder / "requirements.txt").write_text(f"{package}\n")
    (folder / "train.py").write_text("print('trained')\n")
    (folder / "sweep.yaml").write_text(SWEEP)


def outputs(terminal: int) -> Iterator[bytes]:
    """Yield what is written to a terminal; an empty text when it has written nothing for a moment."""
    while True:
        if not select.select([terminal], [], [], 0.05)[0]:
            yield b""
            continue
        try:
            data = os.read(terminal, 65536)
        except OSError:
            # The last process that had the terminal has ended.
            return
        if not data:
            return
        yield data


def measure_command(
    command: Command, folder: Path, environ: Mapping[str, str]
) -> tuple[Silence, int, str]:
    """Run a command on a pseudo-terminal; return its silence, its exit code and its output."""
    argv = [str(BIN / "cloudtrain"), *command.words.split()]
    began = time.monotonic()
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
        os.execve(argv[0], argv, dict(environ))  # noqa: S606 (without a shell)
    shown = b""
    moments = [(0.0, "")]
    is_ended = False
    for data in outputs(terminal):
        now = time.monotonic() - began
        if data and not is_ended:
            shown += data
            moments.append((now, last_line(data)))
        if command.until and re.search(command.until.encode(), shown) and not is_ended:
            is_ended = True
            os.kill(pid, signal.SIGINT)
        if now > _LIMIT_SECONDS:
            os.kill(pid, signal.SIGKILL)
    if not is_ended:
        moments.append((time.monotonic() - began, ""))
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(terminal)
    return longest_silence(moments), code, shown.decode("utf-8", "replace")


def last_line(data: bytes) -> str:
    """Return the last line of an output, without escape sequences."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", data.decode("utf-8", "replace"))
    lines = [line.strip() for line in re.split(r"[\r\n]", text) if line.strip()]
    return lines[-1] if lines else ""


def longest_silence(moments: Sequence[tuple[float, str]]) -> Silence:
    """Return the longest time between two outputs."""
    (since, last), (until, _) = max(pairwise(moments), key=lambda pair: pair[1][0] - pair[0][0])
    return Silence(seconds=moments[-1][0], longest=until - since, since=since, last=last)


def measure(session: Session) -> list[str]:
    """Return the table."""
    options = session.options
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_jobs(folder, options.package)
        environ = clean_environ(
            CLOUDTRAIN_HOME=str(folder / "runs"), HOME=name, TERM="xterm-256color"
        )
        # In CI nothing changes on a terminal.
        environ.pop("CI", None)
        for command in COMMANDS:
            if not command.words.startswith(tuple(options.only)):
                continue
            found, code, shown = measure_command(command, folder, environ)
            expected = (130, *command.codes) if command.until else command.codes
            session.require(bool(shown), f"`{command.words}` has shown nothing")
            if code not in expected:
                session.faults.append(f"`{command.words}` ended with {code}: {shown[-1000:]!r}")
            is_silent = found.longest > options.seconds
            if is_silent:
                session.faults.append(
                    f"`{command.words}` is silent for {found.longest:.1f} s after {found.last!r}"
                )
            rows.append(
                (
                    f"`{command.words}`",
                    f"{found.seconds:.1f}",
                    f"{found.longest:.1f}",
                    f"{found.since:.1f}",
                )
            )
    return markdown_table(["command", "seconds", "longest silence", "it begins at second"], rows)


if __name__ == "__main__":
    BENCHMARK.main(measure)
