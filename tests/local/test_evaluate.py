"""`cloudtrain evaluate` of local runs: the weights of the example, and a Task with all analyses on new data."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.jobs import EXAMPLES, Cli

import cloudtrain

pytestmark = pytest.mark.processes

JOB = """\
name: numbers
code: {task: "numbers_task:Numbers"}
cluster: {instance_type: ml.g5.xlarge, instances: 1, processes_per_instance: 1}
data: {lines: {uri: ./data}}
train: {epochs: 2, batch_size: 4, learning_rate: 0.05}
checkpoint: {every: 2 steps}
"""
TASK = '''
from pathlib import Path
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from cloudtrain_runtime import Task, context

class Numbers(Task):
    """Linear regression of the numbers in a file. It counts tokens, as a language model does."""

    tokens_per_sample = 1

    def model(self):
        return nn.Linear(1, 1)

    def datasets(self):
        text = Path("/opt/ml/input/data/lines/numbers.txt").read_text()
        numbers = torch.tensor([float(line) for line in text.split()]).unsqueeze(1)
        return {"train": TensorDataset(numbers, 2 * numbers)}

    def loss(self, model, batch):
        return F.mse_loss(model(batch[0]), batch[1])

    def predict(self, model, batch):
        return model(batch[0]), batch[1]

    def analyze(self, model, split):
        return {"samples": ["a generated text"], "training": model.training}
'''


def test_the_example_is_evaluated_as_after_its_training(cli: Cli, tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES / "digits", tmp_path / "digits")
    job = tmp_path / "digits" / "job.yaml"
    tags = [
        each
        for tag in ("sweep=s-261128-101500-1a2b3c", "trial=3", "team=vision")
        for each in ("--set", f"tags.{tag}")
    ]
    few = (
        "--set",
        "train.epochs=1",
        "--set",
        "checkpoint.every=15 steps",
        *tags,
        "--follow",
        "--json",
    )
    trained = cli("submit", job, "--local", *few)
    assert trained.code == 0, trained.err
    run = trained.json["run"]
    found = cli("evaluate", run, "--json")
    assert found.code == 0, found.err
    (evaluation,) = found.json["evaluations"]
    test = evaluation["splits"]["test"]
    assert test["metrics"]["accuracy"]["value"] == pytest.approx(
        trained.json["metrics"]["test/accuracy"]
    )
    assert test["metrics"]["loss"]["value"] == pytest.approx(
        trained.json["metrics"]["test/loss"], rel=1e-5
    )
    assert 0 <= test["metrics"]["accuracy"]["low"] < test["metrics"]["accuracy"]["high"] <= 1
    assert sum(map(sum, test["classification"]["confusion"])) == test["samples"] == 270
    assert evaluation["evaluated"] == f"local:{run}"
    plan = cloudtrain.get_run(evaluation["run"]).plan_document()
    assert plan["config"]["evaluation"]["run"] == f"local:{run}", (
        "run.json says that it only evaluates"
    )
    assert cloudtrain.get_run("latest").id == run, "an evaluation is no training"
    assert cloudtrain.get_run("digits-evaluation").id == evaluation["run"]
    assert plan["job"]["tags"] == {"team": "vision"}, "an evaluation is no trial of its run's sweep"
    assert cli("status", evaluation["run"], "--json").json["last_checkpoint"] is None
    earlier = cli("evaluate", run, run, "--checkpoint", "15", "--split", "test")
    assert earlier.code == 0, earlier.err
    header, first, second = earlier.out.splitlines()
    assert header.split() == ["run", "step", "test/accuracy", "test/loss"]
    assert first.split()[:3] == ["1", f"local:{run}", "15"]
    assert second.split()[3:] == first.split()[3:]
    assert len(cloudtrain.get_run(run).evaluations()) == 3
    known = [each["run"] for each in cli("list", "--json").json["runs"]]
    refused = cli("evaluate", run, evaluation["run"])
    assert (refused.code, f"cloudtrain evaluate local:{run}" in refused.err) == (2, True)
    assert cli("evaluate", run, "absent").code == 2
    assert 'did you mean "test"?' in cli("evaluate", run, "--split", "tset").err
    # The example marks no best checkpoint.
    assert cli("evaluate", run, "--base", "--checkpoint", "best").code == 2
    assert [each["run"] for each in cli("list", "--json").json["runs"]] == known, "none has started"
    cli("report", run, "-o", tmp_path / "report.html")
    assert '"test/accuracy"' in (tmp_path / "report.html").read_text()


@pytest.mark.promise
def test_a_task_is_analysed_on_new_data(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "numbers_task.py").write_text(TASK)
    (tmp_path / "job.yaml").write_text(JOB)
    for name, size in (("data", 12), ("new", 20)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "numbers.txt").write_text("\n".join(map(str, range(size))))
    trained = cli("submit", tmp_path / "job.yaml", "--local", "--follow", "--json")
    assert trained.code == 0, trained.err
    found = cli("evaluate", trained.json["run"], "--data", tmp_path / "new", "--json")
    assert found.code == 0, found.err
    split: dict[str, Any] = found.json["evaluations"][0]["splits"]["train"]
    metrics = {name: each["value"] for name, each in split["metrics"].items()}
    assert split["samples"] == split["residuals"]["values"] == 20
    assert metrics["rmse"] == pytest.approx(math.sqrt(metrics["loss"]), rel=1e-5)
    assert metrics["perplexity"] == pytest.approx(math.exp(metrics["loss"]))
    assert split["own"] == {"samples": ["a generated text"], "training": False}
    assert list(found.json["evaluations"][0]["data"].values()) == [str(tmp_path / "new")]
    refused = cli("evaluate", trained.json["run"], "--data", f"lnes={tmp_path}")
    assert refused.code == 2
    assert 'no channel lnes\n  did you mean "lines"?' in refused.err
    for split in ("tset", "test"):
        refused = cli("evaluate", trained.json["run"], "--split", split)
        assert refused.code == 2, "datasets() has no test"
        assert f"has no split '{split}'\n  one of: train\n" in refused.err
    refused = cli("evaluate", trained.json["run"], "--split", "tset", "--data", tmp_path / "new")
    assert "no split 'tset'\n  datasets() may have train, validation, test" in refused.err
    refused = cli("evaluate", trained.json["run"], "--data", tmp_path / "nothing")
    assert refused.code == 2
    assert f"there is no file or folder {tmp_path / 'nothing'}" in refused.err


def test_a_script_is_refused_with_a_hint(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('a script')\n")
    (tmp_path / "job.yaml").write_text(
        "name: script\ncode: {script: train.py}\ncluster: {instance_type: ml.g5.xlarge, processes_per_instance: 1}\n"
    )
    trained = cli("submit", tmp_path / "job.yaml", "--local", "--follow", "--json")
    refused = cli("evaluate", trained.json["run"])
    assert refused.code == 2
    assert "runs a script, and only a Task can be evaluated without training" in refused.err
    assert f"cloudtrain download local:{trained.json['run']} --what model" in refused.err
