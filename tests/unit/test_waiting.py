"""What a command shows while it waits: a line that changes on a terminal, a line a minute elsewhere."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import redirect_stderr, redirect_stdout

import pytest
from support.jobs import until

from cloudtrain import console
from cloudtrain.backends.container.environments import detail_of, last_errors
from cloudtrain.console import terminal, waiting
from cloudtrain.features.rehearsal.output import RehearsalObserver, check_lines
from cloudtrain.support.checks import failed, passed

LINE = b"\x1b[K"
_OPERATION = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|(\r)|(\n)|(.)")


def screen(written: str) -> list[str]:
    """Return the lines that a terminal shows after this output."""
    lines = [""]
    column = 0
    for argument, letter, back, down, text in _OPERATION.findall(written):
        if back:
            column = 0
        elif down:
            lines.append("")
        elif text:
            lines[-1] = lines[-1][:column].ljust(column) + text + lines[-1][column + 1 :]
            column += 1
        elif letter == "K":
            lines[-1] = "" if argument == "2" else lines[-1][:column]
    return [line.rstrip() for line in lines if line.strip()]


class Recorded:
    """A pseudo-terminal in the place of standard error."""

    def __init__(self) -> None:
        self._ours, theirs = pty.openpty()
        self.stream = os.fdopen(theirs, "w")
        self.written = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        # The terminal raises EIO after its last writer has closed it.
        with contextlib.suppress(OSError):
            while data := os.read(self._ours, 100_000):
                self.written += data

    def drawn(self) -> None:
        """Wait until the line was drawn three times more."""
        before = self.written.count(LINE)
        until(lambda: self.written.count(LINE) >= before + 3)

    def end(self) -> str:
        """Return what was written, and close the terminal."""
        self.stream.close()
        self._reader.join()
        os.close(self._ours)
        return self.written.decode()


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """A terminal on which lines appear at once."""
    found = Recorded()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(waiting, "DELAY_SECONDS", 0.0)
    monkeypatch.setattr(waiting, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(terminal, "CHANGING_LINE", terminal.ChangingLine())
    monkeypatch.setattr(waiting, "CHANGING_LINE", terminal.CHANGING_LINE)
    return found


@pytest.fixture
def pipe() -> io.StringIO:
    """A stream that is no terminal."""
    return io.StringIO()


def test_the_line_has_text_detail_and_time(recorded: Recorded) -> None:
    with redirect_stderr(recorded.stream), waiting.waiting("installing") as wait:
        wait.show("Collecting torch")
        recorded.drawn()
    written = recorded.end()
    assert re.search(r"installing  Collecting torch  \x1b\[2m\d+s\x1b\[0m", written)
    assert screen(written) == []


def test_a_short_wait_shows_nothing(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "LEAST_SECONDS", 60.0)
    with redirect_stderr(recorded.stream), waiting.waiting("installing"):
        time.sleep(0.3)
    assert screen(recorded.end().replace("\r", "\n")) == []


def test_output_of_the_block_does_not_mix_with_the_line(recorded: Recorded) -> None:
    with redirect_stderr(recorded.stream), waiting.waiting("installing"):
        recorded.drawn()
        console.print_message("first")
        recorded.drawn()
        console.print_message("second")
        recorded.drawn()
    assert screen(recorded.end()) == ["first", "second"]


def test_a_question_is_not_drawn_over(recorded: Recorded) -> None:
    with redirect_stderr(recorded.stream), waiting.waiting("installing"):
        recorded.drawn()
        print("continue? ", end="", file=sys.stderr, flush=True)
        time.sleep(0.5)
    assert screen(recorded.end()) == ["continue?"]


def test_the_innermost_wait_is_shown(recorded: Recorded) -> None:
    with redirect_stderr(recorded.stream), waiting.waiting("outer"):
        recorded.drawn()
        with waiting.waiting("inner"):
            recorded.drawn()
        recorded.drawn()
    shown = re.findall("outer|inner", recorded.end())
    assert [name for name, _ in itertools.groupby(shown)] == ["outer", "inner", "outer"]


def test_a_progress_bar_hides_the_line(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "PROGRESS_DELAY_SECONDS", 0.0)
    with (
        redirect_stderr(recorded.stream),
        waiting.waiting("packing"),
        console.progress_bar("reading") as show,
    ):
        recorded.drawn()
        show(1, 2)
        time.sleep(0.3)
        show(2, 2)
    written = recorded.end()
    bar = written[written.index("\x1b[?25l") : written.index("\x1b[?25h")]
    assert "reading" in bar
    assert "packing" not in bar


def test_a_long_step_leaves_its_ending(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "LONG_SECONDS", 0.0)
    with redirect_stderr(recorded.stream), waiting.waiting("installing") as wait:
        recorded.drawn()
        wait.end("Installed 14 packages")
    wait = waiting.Waiting("again")
    wait.end("Installed 15 packages")
    with pytest.raises(ValueError, match="pip"), redirect_stderr(recorded.stream), wait:
        raise ValueError("pip")
    assert re.fullmatch(r"Installed 14 packages in \d+s", "\n".join(screen(recorded.end())))


def test_the_line_fits_its_terminal(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    with redirect_stderr(recorded.stream), waiting.waiting("installing") as wait:
        wait.show("Collecting a-package-with-a-long-name from 日本語" * 3)
        recorded.drawn()
    lines = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", recorded.end()).split("\r")
    shown = [line for line in lines if "installing" in line]
    assert shown
    assert all(len(line) <= 29 and "…" in line and line.endswith("s") for line in shown)


def test_no_color_removes_only_the_colours(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    with redirect_stderr(recorded.stream), waiting.waiting("installing"):
        recorded.drawn()
    written = recorded.end()
    assert "installing" in written
    assert "\x1b[2m" not in written


@pytest.mark.parametrize(("name", "value"), [("TERM", "dumb"), ("CI", "true")])
def test_where_no_line_can_change_lines_are_printed(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with redirect_stderr(recorded.stream), waiting.waiting("installing", is_long=True):
        time.sleep(0.3)
    assert recorded.end() == "installing\r\n"


def test_a_pipe_gets_a_line_a_minute(pipe: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "LINE_SECONDS", 0.2)
    with redirect_stderr(pipe), waiting.waiting("installing", is_long=True) as wait:
        wait.show("Collecting torch")
        while pipe.getvalue().count("\n") < 3:
            time.sleep(0.02)
    first, *others = pipe.getvalue().splitlines()
    assert first == "installing"
    assert all(re.fullmatch(r"installing  Collecting torch: \d+s", line) for line in others)


def test_threads_can_show_how_far_they_are(recorded: Recorded) -> None:
    with redirect_stderr(recorded.stream), waiting.waiting("uploading"):
        threads = [
            threading.Thread(target=lambda: console.print_message("uploaded")) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        recorded.drawn()
    assert screen(recorded.end()) == ["uploaded"] * 8


@pytest.mark.parametrize("flushes", [False, True])
def test_output_in_a_pipe_does_not_mix_with_the_line(recorded: Recorded, *, flushes: bool) -> None:
    """Standard output is a pipe whose reader writes to the same terminal, as in `cloudtrain logs RUN -f | cat`."""

    class Piped(io.StringIO):
        def write(self, text: str) -> int:
            if not flushes:
                recorded.stream.write(text)
            return super().write(text)

        def flush(self) -> None:
            recorded.stream.write(self.getvalue() if flushes else "")
            recorded.stream.flush()
            self.seek(0)
            self.truncate()

    with redirect_stdout(Piped()), redirect_stderr(recorded.stream), waiting.waiting("installing"):
        recorded.drawn()
        print("first")
        recorded.drawn()
        sys.stdout.flush()
        recorded.drawn()
    assert screen(recorded.end()) == ["first"]


INTERRUPTED = """
import sys, time
from cloudtrain.console import print_message, waiting
waiting.DELAY_SECONDS = 0
try:
    with waiting.waiting("installing"):
        time.sleep(600)
except KeyboardInterrupt:
    print_message("interrupted")
"""


def test_ctrl_c_removes_the_line() -> None:
    ours, theirs = pty.openpty()
    environ = {**os.environ, "TERM": "xterm"}
    process = subprocess.Popen([sys.executable, "-c", INTERRUPTED], stderr=theirs, env=environ)
    os.close(theirs)
    shown = b""
    while shown.count(LINE) < 3:
        shown += os.read(ours, 10_000)
    process.send_signal(signal.SIGINT)
    # The terminal raises EIO after its last writer has closed it.
    with contextlib.suppress(OSError):
        while data := os.read(ours, 10_000):
            shown += data
    os.close(ours)
    assert process.wait(60) == 0
    assert screen(shown.decode()) == ["interrupted"]


def test_a_silent_command_shows_its_name(recorded: Recorded) -> None:
    """Its first output ends the line for good: it may be a server, or draw on the terminal itself."""
    with (
        redirect_stderr(recorded.stream),
        terminal.filtered_streams(),
        waiting.waiting_for_output("status"),
    ):
        recorded.drawn()
        console.print_message("the status")
        time.sleep(0.5)
    before, after = recorded.end().split("the status")
    assert "cloudtrain status" in before
    assert after == "\r\n"


@pytest.mark.parametrize(
    ("line", "detail"),
    [
        ("Collecting torch>=2 (from -r requirements.txt (line 1))", "Collecting torch>=2"),
        (
            "  Downloading torch-2.5.1-cp311-cp311-manylinux1_x86_64.whl.metadata (28 kB)",
            "Downloading torch-2.5.1 (28 kB)",
        ),
        (
            "Downloading torch-2.5.1-cp311-cp311-manylinux1_x86_64.whl (906.4 MB)",
            "Downloading torch-2.5.1 (906.4 MB)",
        ),
        ("Installing collected packages: sympy, torch", "Installing collected packages"),
        ("Looking in indexes: https://user:secret@example.com/simple", ""),
        ("Requirement already satisfied: numpy", ""),
    ],
)
def test_pips_lines_become_short_details(line: str, detail: str) -> None:
    assert detail_of(line) == detail


def test_an_error_of_pip_begins_with_its_first_error() -> None:
    lines = ["Collecting tiny", "", "  error: subprocess failed", "the reason", "ERROR: no tiny"]
    assert last_errors(lines) == lines[2:]
    assert last_errors(["Killed", ""]) == ["Killed"]


def test_a_check_is_shown_once_in_a_pipe(pipe: io.StringIO) -> None:
    with redirect_stderr(pipe), waiting.waiting("planning") as wait:
        observer = RehearsalObserver(wait)
        observer.on_progress("training 12 steps")
        for _ in range(3):
            observer.on_check(passed("trains", "12 steps"), 60.0)
    assert pipe.getvalue().splitlines() == [
        "rehearsal: training 12 steps",
        "rehearsal: trains proven in 0s, 1m left",
    ]


def test_a_check_has_sign_name_time_and_details(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr("sys.stderr", io.TextIOWrapper(io.BytesIO(), encoding="utf-8"))
    assert check_lines(passed("trains", "12 steps on 4 ranks " * 3), 14.2) == [
        "✓ trains       14s  12 steps on 4 ranks 12 steps on 4 ranks",
        "                    12 steps on 4 ranks",
    ]
    monkeypatch.setattr("sys.stderr", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert check_lines(failed("trains", "no"), 0.2) == ["failed  trains            no"]
