"""Evaluations: the weights of a run on data, without training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cloudtrain.support.lazy_names import import_lazily, modules_by_name

if TYPE_CHECKING:  # for type checkers and editors; the same names as in `_NAMES`
    from cloudtrain.features.evaluation.evaluating import EvaluationOptions as EvaluationOptions
    from cloudtrain.runs.evaluations import EvaluatedSplit as EvaluatedSplit
    from cloudtrain.runs.evaluations import Evaluation as Evaluation
    from cloudtrain.runs.evaluations import Measurement as Measurement
    from cloudtrain.runs.evaluations import Ranking as Ranking
    from cloudtrain.runs.evaluations import rank_evaluations as rank_evaluations

_NAMES = {
    "features.evaluation.evaluating": "EvaluationOptions",
    "runs.evaluations": "EvaluatedSplit Evaluation Measurement Ranking rank_evaluations",
}
"""The public names by the module that defines them."""

_MODULE_OF = modules_by_name(_NAMES)

__all__ = sorted(_MODULE_OF)  # noqa: PLE0605 (a list of strings, but no literal)
__getattr__ = import_lazily(__name__, _MODULE_OF)
