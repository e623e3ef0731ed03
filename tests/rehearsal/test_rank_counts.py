"""What losses after a resume with another number of ranks show."""

from __future__ import annotations

import pytest

from cloudtrain.features.rehearsal.rank_counts import judge_losses
from cloudtrain.support.checks import Result

REFERENCE = {5: 1.0, 6: 0.8, 7: 0.6}


@pytest.mark.parametrize(
    ("resumed", "result", "reason"),
    [
        ({5: 1.0, 6: 0.80001, 7: 0.6}, Result.PASS, "differ by 1.2e-05"),
        ({5: 0.5, 6: 0.45, 7: 0.4}, Result.FAIL, "in proportion to the number of ranks"),
        ({5: 2.0, 6: 1.5, 7: 1.1}, Result.FAIL, "in proportion to the number of ranks"),
        ({5: 1.0, 6: 0.9, 7: 0.8}, Result.FAIL, "the updates depend on the ranks"),
        ({5: 1.1, 6: 0.7, 7: 0.7}, Result.UNKNOWN, "dropout, batch statistics, or a fault"),
        ({6: None}, Result.PASS, ""),
    ],
)
def test_losses_are_judged(resumed: dict[int, float | None], result: Result, reason: str) -> None:
    found, text = judge_losses(REFERENCE, resumed, before=2, after=1)
    assert found is result
    assert reason in text
