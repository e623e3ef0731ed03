"""One rule says what a terminal is: every way to print follows it."""

import io
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, cast

import pytest

from cloudtrain.console import coloured, print_checks
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
    for name in ("CI", "JPY_PARENT_PID", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "40")
    return found


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
