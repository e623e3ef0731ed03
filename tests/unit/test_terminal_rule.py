"""One rule says what a terminal is: every way to print follows it."""

import fcntl
import io
import os
import pty
import struct
import termios
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, cast

import pytest

from cloudtrain.console import coloured, print_checks
from cloudtrain.console.cells import cell_count, pad
from cloudtrain.console.closing import _Fact, _row_lines
from cloudtrain.console.facts import fact_lines
from cloudtrain.console.terminal import can_show, columns_of, terminal_width
from cloudtrain.features.sweeps import output
from cloudtrain.features.sweeps.handle import Sweep


class Screen(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        """Return true."""
        return True


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    """A terminal of 40 columns."""
    found = Screen()
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "40")
    return found


def stream(encoding: str) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(), encoding=encoding)


NO_TERMINAL = [("CI", "1"), ("TERM", "dumb"), ("JPY_PARENT_PID", "1")]


def test_no_color_removes_the_colours_alone(
    screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    with redirect_stdout(screen):
        assert coloured("x", "31") == "\x1b[31mx\x1b[0m"
        monkeypatch.setenv("NO_COLOR", "1")
        print_checks([("pass", "name", "word " * 20, ())], {"pass": "32"}, wraps=True)
    assert "\x1b" not in screen.getvalue()
    assert len(screen.getvalue().splitlines()) > 1


@pytest.mark.parametrize(("name", "value"), NO_TERMINAL)
def test_checks_are_plain_lines_elsewhere(
    name: str, value: str, screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with redirect_stdout(screen):
        print_checks([("pass", "name", "word " * 20, ())], {"pass": "32"}, wraps=True)
    assert screen.getvalue() == f"pass  name  {'word ' * 20}\n"


@pytest.mark.parametrize(("name", "value"), NO_TERMINAL)
def test_a_followed_sweep_is_plain_lines_elsewhere(
    name: str, value: str, screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Followed:
        id = "rates-261125-223727-71810a"
        log = Path("log")
        has_printed_lines = False

        def follow_trials(self, show: Any) -> Any:
            del show
            self.has_printed_lines = True
            raise KeyboardInterrupt

    monkeypatch.setenv(name, value)
    sweep = Followed()
    with redirect_stdout(screen):
        output.follow_sweep(cast("Sweep", sweep), as_json=False)
    assert sweep.has_printed_lines
    assert screen.getvalue() == ""


def test_what_a_stream_can_show_depends_on_its_encoding() -> None:
    assert can_show("✓", stream("utf-8"))
    assert not can_show("✓", stream("ascii"))
    assert not can_show("✓", io.StringIO())
    assert can_show("ok", io.StringIO())


def test_an_unknown_encoding_can_show_nothing() -> None:
    class Odd(io.StringIO):
        encoding = "no-such-encoding"

    assert not can_show("✓", Odd())


@pytest.mark.parametrize("columns", ["", "0", "wide", "²", "-5"])
def test_an_unknown_width_is_80(
    columns: str, screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert terminal_width(screen) == 40
    assert terminal_width(io.StringIO()) is None
    monkeypatch.setenv("COLUMNS", columns)
    assert columns_of(screen) == terminal_width(screen) == 80


def test_the_width_is_that_of_the_asked_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 33, 0, 0))
    with os.fdopen(theirs, "w") as terminal:
        assert columns_of(terminal) == 33
    os.close(ours)


def test_names_are_padded_by_cells() -> None:
    assert pad("東京", 6) == "東京  "
    assert pad("longer", 2) == "longer"
    for lines in (
        fact_lines([("東京", "1"), ("name", "1")], 80),
        list(_row_lines([_Fact("東京", "京", "1"), _Fact("name", "ab", "1")], 80)),
    ):
        assert {cell_count(line.rpartition("1")[0]) for line in lines} == {
            cell_count(lines[0].rpartition("1")[0])
        }
