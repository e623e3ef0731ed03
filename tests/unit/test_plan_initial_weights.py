"""`train.init_from` in a plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.jobs import Cli
from support.plans import TASK_JOB, PlanOf, local, refusal

RUN = "demo-261119-101500-aaaaaa"


def test_the_plan_names_the_initial_weights(plan_of: PlanOf) -> None:
    plan = plan_of("train.init_from=s3://bucket/model.pt")
    assert plan.config.train is not None
    assert plan.config.train.init_from == "s3://bucket/model.pt"
    assert any(
        "a new run starts with the weights of s3://bucket/model.pt" in line
        for line in plan.decisions
    )
    assert plan.config.training["train"]["init_from"] == "s3://bucket/model.pt"
    assert '"init_from": "s3://bucket/model.pt"' in plan.config.to_json()


def test_a_plan_without_initial_weights_has_no_such_field(plan_of: PlanOf) -> None:
    assert "init_from" not in plan_of().config.to_json()


def test_a_path_is_for_local_runs(plan_of: PlanOf, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    assert "there is no file or folder" in refusal(plan_of, f"train.init_from={path}", **local())
    path.touch()
    assert plan_of(f"train.init_from={path}", **local()).config.training["train"][
        "init_from"
    ] == str(path)
    assert "a cluster cannot read a path on this machine" in refusal(
        plan_of, f"train.init_from={path}"
    )


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (RUN, f"there is no run {RUN} here"),
        ("''", 'expected where the weights are, got ""'),
        ("file:model.pt", 'expected where the weights are, got "file:model.pt"'),
        ("gs://bucket/model.pt", "expected s3://bucket/prefix"),
        ("s3://", "for example s3://my-bucket/model.pt"),
    ],
)
def test_wrong_initial_weights_are_refused(plan_of: PlanOf, value: str, expected: str) -> None:
    assert expected in refusal(plan_of, f"train.init_from={value}")


def test_an_isolated_container_reads_no_weights(plan_of: PlanOf) -> None:
    text = (
        "train.init_from=s3://bucket/model.pt",
        "cluster.network.isolation=true",
        "cluster.instances=1",
    )
    assert "an isolated container cannot read S3" in refusal(plan_of, *text)


def test_a_relative_path_is_found_beside_the_job(cli: Cli, job: Callable[..., Path]) -> None:
    text = TASK_JOB.replace("epochs: 3", "epochs: 3, init_from: base/model.pt")
    path = job(text, mine_py="class Mine(Task):\n    def __init__(self, layers): ...\n")
    (path.parent / "base").mkdir()
    weights = path.parent / "base" / "model.pt"
    wrong = path.parent / "base" / "models.pt"
    wrong.touch()
    refused = cli("plan", path, "--local")
    assert refused.code == 2
    place = (
        f"{path}:4:31  train.init_from: there is no file or folder {weights}; did you mean {wrong}?"
    )
    assert refused.err.splitlines()[0] == place
    weights.write_bytes(b"PK")
    planned = cli("plan", path, "--local", "--json", cwd=path.parent.parent)
    assert f"starts with the weights of {weights.as_uri()};" in "".join(planned.json["decisions"])
    assert (
        f"{path}:4:31  train.init_from: a cluster cannot read a path on this machine"
        in cli("validate", path).err
    )
