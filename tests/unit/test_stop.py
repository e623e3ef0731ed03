"""Which texts stop a billed run without a question."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from cloudtrain.cli import runs
from cloudtrain.client import shortcuts
from cloudtrain.runs.status import State

RUN = "digits-261125-223727-71810a"


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The runs that were stopped; the account has one, which every text means."""
    found: list[str] = []
    run = SimpleNamespace(
        id=RUN,
        reference=f"sagemaker:{RUN}",
        state=State.RUNNING,
        is_billed=True,
        stop=lambda: found.append(RUN),
        status=lambda: None,
    )
    monkeypatch.setattr(shortcuts, "get_run", lambda _: run)
    monkeypatch.setattr(runs, "_print_status", lambda *_, **__: None)
    return found


@pytest.mark.parametrize("text", [RUN, f"sagemaker:{RUN}", "71810a"])
def test_the_printed_handle_stops_a_billed_run(stopped: list[str], text: str) -> None:
    done = CliRunner().invoke(runs.stop, [text, "--no-wait"])
    assert "Stop it?" not in done.output
    assert stopped == [RUN]


@pytest.mark.parametrize("text", ["digits", "1810a", "7-71810a", "latest"])
def test_another_text_asks_before_a_billed_run_ends(stopped: list[str], text: str) -> None:
    done = CliRunner().invoke(runs.stop, [text, "--no-wait"])
    assert done.exit_code != 0
    assert stopped == []
