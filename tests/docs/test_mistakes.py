"""Forty planted mistakes: cloudtrain notices each of them, and docs/reference/mistakes.md tells who else does."""

from collections import Counter
from pathlib import Path

import pytest
from support.jobs import serve_moto
from support.mistakes import (
    ESTIMATOR,
    JOB,
    MISTAKES,
    REQUEST,
    Mistake,
)
from support.mistakes_table import (
    CAUGHT,
    MISSED,
    TABLE,
    Answers,
    judges,
    plant,
    rows,
    table_rows,
)

pytestmark = [pytest.mark.aws, pytest.mark.filterwarnings("ignore")]

# Nothing planted: the whole good job is the text to replace, and to be seen by everybody.
_GOOD = Mistake("nothing is wrong", (JOB, f"«{JOB}»"), request={}, estimator={})


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Answers]:
    """Ask everybody about the good job and then about each mistake."""
    with serve_moto(tmp_path / "moto.log") as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
        with judges() as asked:
            return asked.ask_all((_GOOD, *MISTAKES), tmp_path)


def test_who_notices(answers: list[Answers]) -> None:
    """One test, because the answers cost ten seconds and all of them make one table."""
    good, *found = answers
    assert (good.cloudtrain, good.boto3, good.estimator, good.moto) == (MISSED,) * 4, good.said
    unnoticed = {m.title: a.said for m, a in zip(MISTAKES, found, strict=True) if a.cloudtrain != CAUGHT}
    assert not unnoticed, "\n\n".join(f"{title}: {said}" for title, said in unnoticed.items())
    assert all(answer.place for answer in found)
    assert sum(CAUGHT not in (a.boto3, a.estimator, a.moto) for a in found) >= 12
    assert table_rows(TABLE.read_text()) == rows(found), "PYTHONPATH=tests python -m support.mistakes_table --write"


def test_there_are_forty_different_ones() -> None:
    assert len(MISTAKES) == 40
    assert len({mistake.title for mistake in MISTAKES}) == 40
    places = Counter(mistake.job for mistake in MISTAKES if mistake.job is not None)
    assert max(places.values()) == 1


def test_each_mistake_changes_something() -> None:
    for mistake in MISTAKES:
        planted = plant(mistake)
        assert mistake.files or (planted is not None and planted.text != JOB), mistake.title
        assert planted is not None or mistake.names in mistake.files, mistake.title
        says_nothing = mistake.request is None and mistake.estimator is None
        assert says_nothing or mistake.request or mistake.estimator or mistake.fit or mistake.files, mistake.title


def test_the_place_must_lie_inside_of_what_was_planted() -> None:
    planted = plant(Mistake("", ("instances: 2", "instances: «two»")))
    assert planted is not None
    line = JOB.splitlines().index("  instances: 2") + 1
    assert planted.text.splitlines()[line - 1] == "  instances: two"
    assert [planted.holds(line, column) for column in (13, 14, 16, 17)] == [False, True, True, False]
    assert not planted.holds(line - 1, 14)
    assert not planted.holds(None, None)


def test_all_three_forms_are_the_same_job() -> None:
    assert REQUEST["ResourceConfig"]["InstanceType"] == ESTIMATOR["instance_type"]
    assert REQUEST["ResourceConfig"]["InstanceCount"] == ESTIMATOR["instance_count"]
    assert REQUEST["AlgorithmSpecification"]["TrainingImage"] == ESTIMATOR["image_uri"]
    assert REQUEST["HyperParameters"].items() >= ESTIMATOR["hyperparameters"].items()
    for text in (REQUEST["ResourceConfig"]["InstanceType"], REQUEST["CheckpointConfig"]["S3Uri"], "NCCL_DEBUG"):
        assert text in JOB
