"""Forty mistakes: cloudtrain reports each of them, and docs/reference/mistakes.md shows which other tools do."""

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
    Results,
    open_tools,
    plant,
    rows,
    table_rows,
)

pytestmark = [pytest.mark.aws, pytest.mark.filterwarnings("ignore")]

# The valid job, replaced by itself.
_VALID = Mistake("no mistake", (JOB, f"«{JOB}»"), request={}, estimator={})


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Results]:
    """Run every tool on the valid job and then on each mistake."""
    with serve_moto(tmp_path / "moto.log") as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
        with open_tools() as tools:
            return tools.check_all((_VALID, *MISTAKES), tmp_path)


@pytest.mark.promise
def test_cloudtrain_reports_every_mistake(results: list[Results]) -> None:
    """One test, because running the tools takes ten seconds, and the table contains all results."""
    valid, *found = results
    assert (valid.cloudtrain, valid.boto3, valid.estimator, valid.moto) == (MISSED,) * 4, (
        valid.output
    )
    unreported = {
        m.title: a.output for m, a in zip(MISTAKES, found, strict=True) if a.cloudtrain != CAUGHT
    }
    assert not unreported, "\n\n".join(f"{title}: {output}" for title, output in unreported.items())
    assert all(each.place for each in found)
    assert sum(CAUGHT not in (a.boto3, a.estimator, a.moto) for a in found) >= 12
    assert table_rows(TABLE.read_text()) == rows(found), (
        "PYTHONPATH=tests python -m support.mistakes_table --write"
    )


def test_there_are_forty_different_mistakes() -> None:
    assert len(MISTAKES) == 40
    assert len({mistake.title for mistake in MISTAKES}) == 40
    places = Counter(mistake.job for mistake in MISTAKES if mistake.job is not None)
    assert max(places.values()) == 1


def test_each_mistake_changes_something() -> None:
    for mistake in MISTAKES:
        planted = plant(mistake)
        assert mistake.files or (planted is not None and planted.text != JOB), mistake.title
        assert planted is not None or mistake.file in mistake.files, mistake.title
        is_job_file_only = mistake.request is None and mistake.estimator is None
        assert (
            is_job_file_only or mistake.request or mistake.estimator or mistake.fit or mistake.files
        ), mistake.title


def test_the_place_must_be_inside_of_the_mistake() -> None:
    planted = plant(Mistake("", ("instances: 2", "instances: «two»")))
    assert planted is not None
    line = JOB.splitlines().index("  instances: 2") + 1
    assert planted.text.splitlines()[line - 1] == "  instances: two"
    assert [planted.contains(line, column) for column in (13, 14, 16, 17)] == [
        False,
        True,
        True,
        False,
    ]
    assert not planted.contains(line - 1, 14)
    assert not planted.contains(None, None)


def test_all_three_forms_are_the_same_job() -> None:
    assert REQUEST["ResourceConfig"]["InstanceType"] == ESTIMATOR["instance_type"]
    assert REQUEST["ResourceConfig"]["InstanceCount"] == ESTIMATOR["instance_count"]
    assert REQUEST["AlgorithmSpecification"]["TrainingImage"] == ESTIMATOR["image_uri"]
    assert REQUEST["HyperParameters"].items() >= ESTIMATOR["hyperparameters"].items()
    for text in (
        REQUEST["ResourceConfig"]["InstanceType"],
        REQUEST["CheckpointConfig"]["S3Uri"],
        "NCCL_DEBUG",
    ):
        assert text in JOB
