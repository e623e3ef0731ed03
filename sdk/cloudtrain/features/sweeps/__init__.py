"""Sweeps: search the fields of a job for the best value of a metric, within a budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cloudtrain.support.lazy_names import import_lazily, modules_by_name

if TYPE_CHECKING:  # for type checkers and editors; the same names as in `_NAMES`
    from cloudtrain.features.sweeps.handle import Sweep as Sweep
    from cloudtrain.features.sweeps.results import SweepState as SweepState
    from cloudtrain.features.sweeps.results import SweepStatus as SweepStatus
    from cloudtrain.features.sweeps.trial import Trial as Trial
    from cloudtrain.features.sweeps.trial import TrialState as TrialState

_NAMES = {
    "features.sweeps.handle": "Sweep",
    "features.sweeps.results": "SweepState SweepStatus",
    "features.sweeps.trial": "Trial TrialState",
}
"""The public names by the module that defines them."""

_MODULE_OF = modules_by_name(_NAMES)

__all__ = sorted(_MODULE_OF)  # noqa: PLE0605 (a list of strings, but no literal)
__getattr__ = import_lazily(__name__, _MODULE_OF)
