"""Figures of metrics, drawn by the real matplotlib."""

import io
import sys
from typing import Any

import pytest
from support.run_logs import LoggedRun

from cloudtrain import Run, UserError
from cloudtrain.errors import MissingExtraError
from cloudtrain.support.installation import install_command

EVENTS = [
    {"event": "step", "step": 10, "loss": 2.0, "learning_rate": 0.1, "mfu": 0.4},
    {"event": "evaluation", "step": 10, "split": "validation", "loss": 2.5, "accuracy": 0.5},
    {"event": "step", "step": 20, "loss": None, "learning_rate": 0.05},
    {"event": "step", "step": 30, "loss": 1.0, "learning_rate": 0.01},
]


@pytest.fixture(autouse=True)
def _matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "agg")
    pytest.importorskip("matplotlib")


def curves(axis: Any) -> dict[str, list[Any]]:
    return {line.get_label(): list(line.get_xdata()) for line in axis.lines}


def test_splits_of_a_metric_share_a_diagram() -> None:
    figure = Run("demo-261120-101500-1a2b3c", LoggedRun(EVENTS)).plot()
    assert [axis.get_ylabel() for axis in figure.axes] == ["loss", "learning_rate", "accuracy"]
    assert curves(figure.axes[0]) == {"train": [10, 20, 30], "validation": [10]}
    assert (
        figure.axes[2].lines[0].get_color() == figure.axes[0].lines[1].get_color() == "C1"
    )  # of validation
    assert figure.get_suptitle() == "demo-261120-101500-1a2b3c"
    written = io.BytesIO()
    figure.savefig(written, format="png")
    assert written.getvalue().startswith(b"\x89PNG")


def test_metrics_can_be_selected() -> None:
    run = Run("x", LoggedRun(EVENTS))
    assert [axis.get_ylabel() for axis in run.plot("mfu", "train/loss").axes] == ["mfu", "loss"]
    with pytest.raises(UserError, match="no metric 'los'"):
        run.plot("los")


def test_a_figure_is_not_open_twice() -> None:
    """A notebook would show an open figure besides the value of the cell."""
    import matplotlib.pyplot as plt

    Run("x", LoggedRun(EVENTS)).plot()
    assert plt.get_fignums() == []


def test_a_run_without_metrics_has_no_figure() -> None:
    with pytest.raises(UserError, match="reported no metrics so far"):
        Run("x", LoggedRun()).plot()


def test_without_matplotlib_the_error_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # makes its import fail
    with pytest.raises(MissingExtraError) as error:
        Run("x", LoggedRun(EVENTS)).plot()
    assert install_command("notebook") in error.value.hint
