"""Figures of metrics with matplotlib."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from cloudtrain.errors import MissingExtraError, UserError
from cloudtrain.support.installation import install_command, pip_install

_WIDTH_INCHES = 7.0
_HEIGHT_INCHES = 2.6
_MOST_MARKERS = 50
"""Longer curves have no markers."""


Curve = Sequence[tuple[int, float | None]]
"""Steps and values of a metric, in the order of the steps; a value that is not finite is None."""


def draw_metrics(metrics: Mapping[str, Curve], title: str) -> Any:
    """Return a figure with one diagram per metric, in which each split has a curve, everywhere in the same colour.

    Args:
        metrics: Curves by `split/name`.
        title: Title of the figure.

    Raises:
        MissingExtraError: matplotlib is not installed.
        UserError: there is no metric.
    """
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        hint = f"{install_command('notebook')}, or {pip_install('matplotlib')}"
        raise MissingExtraError("figures need matplotlib", hint) from None
    if not metrics:
        raise UserError(
            "this run has reported no metrics so far", "draw them when run.history() has rows"
        )
    diagrams: dict[str, dict[str, Curve]] = {}
    for name, values in metrics.items():
        split, _, short = name.rpartition("/")
        diagrams.setdefault(short, {})[split or "train"] = values
    size = (_WIDTH_INCHES, _HEIGHT_INCHES * len(diagrams))
    figure, axes = plt.subplots(
        len(diagrams), sharex=True, squeeze=False, figsize=size, layout="constrained"
    )
    splits = list(dict.fromkeys(split for curves in diagrams.values() for split in curves))
    colours = {split: f"C{index}" for index, split in enumerate(splits)}
    for axis, (name, curves) in zip(axes[:, 0], diagrams.items(), strict=True):
        _draw(axis, name, curves, colours)
    axes[-1, 0].set_xlabel("step")
    figure.suptitle(title, fontsize="medium")
    # Else a notebook would show it twice: as the value of the cell and as an open figure.
    plt.close(figure)
    return figure


def _draw(axis: Any, name: str, curves: Mapping[str, Curve], colours: Mapping[str, str]) -> None:
    for split, values in curves.items():
        numbers = [math.nan if value is None else value for _, value in values]
        marker = "." if len(values) <= _MOST_MARKERS else None
        axis.plot(
            [step for step, _ in values], numbers, label=split, color=colours[split], marker=marker
        )
    axis.set_ylabel(name)
    axis.grid(visible=True, alpha=0.3)
    axis.legend(frameon=False, fontsize="small")
