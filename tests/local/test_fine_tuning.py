"""The example of a fine-tuned Task: its base, its frozen layers, its rates, a stop and a resume, the comparison."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.jobs import EXAMPLES, REPOSITORY, Cli, until

import cloudtrain
from cloudtrain.features.serving.package import ServingOptions, make_package

pytestmark = pytest.mark.processes

# At step STOP_AT it waits for the stop notice.
PROBE = """
import os, time
from pathlib import Path
from cloudtrain_runtime import context
from cloudtrain_runtime.process.environment import ml_tree
from digits import Digits

class Probe(Digits):
    def loss(self, model, batch):
        if model.training and context().step == int(os.environ["STOP_AT"]):
            Path(os.environ["WAITS"]).touch()
            while not ml_tree(os.environ).stop_notice.exists():
                time.sleep(0.01)
        return super().loss(model, batch)
"""
PAGE = (REPOSITORY / "docs" / "how-to" / "fine-tuning.md").read_text()
(NEW_HEAD,) = re.findall(r"```python\n(# new_head\.py\n.*?)```", PAGE, flags=re.DOTALL)
(NEW_HEAD_JOB,) = re.findall(r"```yaml\n(name: parity\n.*?)```", PAGE, flags=re.DOTALL)
SERVE = """
import sys
from pathlib import Path
from cloudtrain_runtime.serving.predictor import Predictor, load_folder
folder = Path(sys.argv[1])
predictor = Predictor.from_folder(folder, load_folder(folder))
print(len(predictor.predict([predictor.read("application/json", sys.argv[2].encode())], 1)[0][0]))
"""
ONE = ("--local", "--set=cluster.processes_per_instance=1", "--json")


def weights_of(status: dict[str, Any]) -> dict[str, torch.Tensor]:
    path = Path(status["artifacts"]["model_folder"]) / "model.pt"
    loaded: dict[str, torch.Tensor] = torch.load(path, weights_only=True)
    return loaded


def test_a_task_is_fine_tuned_and_compared_with_its_base(cli: Cli, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(EXAMPLES / "finetune-task", tmp_path / "job"))
    (folder / "probe.py").write_text(PROBE)
    job, waits = folder / "job.yaml", tmp_path / "waits"
    trained = cli("submit", folder / "base.yaml", *ONE, "--set=train.epochs=2", "--follow")
    assert trained.code == 0, trained.err
    base = trained.json["run"]
    tune = (
        "submit",
        job,
        *ONE,
        f"--set=train.init_from={base}",
        "--set=code.task=probe:Probe",
        "--set=train.epochs=3",
    )
    tune = (*tune, f"--set=code.env.WAITS={waits}")
    done = cli(*tune, "--set=code.env.STOP_AT=-1", "--follow")
    assert done.code == 0, done.err
    stopped = cli(*tune, "--set=code.env.STOP_AT=17").json["run"]
    until(lambda: waits.exists() or cli("status", stopped, "--json").json["exit_code"])
    assert cli("stop", stopped, "--json").json["state"] == "STOPPED", cli("logs", stopped).out
    resumed = cli("resume", stopped, "--set=code.env.STOP_AT=-1", "--follow", "--json")
    assert resumed.code == 0, resumed.err
    assert (
        17 <= resumed.json["first_step"] < resumed.json["last_step"] == done.json["last_step"] == 39
    )

    before, after, again = map(weights_of, (trained.json, done.json, resumed.json))
    assert all(torch.equal(after[name], again[name]) for name in after)
    unchanged = {name for name in before if torch.equal(before[name], after[name])}
    assert unchanged == {name for name in before if name.startswith("backbone.0.")}, (
        "batch norm's statistics, too"
    )
    run = done.json["run"]
    logged = cli("metrics", run, "--json").json["metrics"]
    head, backbone = (
        [each["value"] for each in logged[f"train/learning_rate_{name}"]]
        for name in ("head", "backbone")
    )
    assert backbone == pytest.approx([rate / 10 for rate in head])
    assert max(head) > 0

    found = cli("evaluate", run, "--base", "--split", "test", "--json")
    assert found.code == 0, found.err
    tuned, initial = found.json["evaluations"]
    assert found.json["metric"] == "test/accuracy"
    assert (tuned["step"], initial["step"], initial["weights"]) == (
        39,
        0,
        f"{checkpoints_of(base)}",
    )
    assert accuracy(tuned) > accuracy(initial) + 0.05
    (own,) = cli("evaluate", base, "--set=code.args.photos=true", "--split", "test", "--json").json[
        "evaluations"
    ]
    assert accuracy(own) == accuracy(initial)
    compared = cli("compare", base, run, "--json").json["metrics"]
    (shown,) = (each["best"] for each in compared if each["metric"] == "evaluated test/accuracy")
    assert shown == [accuracy(own), accuracy(tuned)], "not that of the weights that it started with"


def test_a_new_head_gets_the_backbone_of_its_base(cli: Cli, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(EXAMPLES / "finetune-task", tmp_path / "job"))
    (folder / "new_head.py").write_text(NEW_HEAD)
    (folder / "parity.yaml").write_text(NEW_HEAD_JOB)
    (tmp_path / "base").mkdir()
    base = runpy.run_path(str(folder / "digits.py"))["Classifier"](0).state_dict()
    torch.save(base, tmp_path / "base" / "model.pt")
    trained = cli(
        "submit",
        folder / "parity.yaml",
        *ONE,
        f"--set=data.base.uri={tmp_path / 'base'}",
        "--follow",
    )
    assert trained.code == 0, trained.err
    weights = weights_of(trained.json)
    assert torch.equal(weights["backbone.0.0.weight"], base["backbone.0.0.weight"])
    assert list(weights["head.3.weight"].shape) == [2, 512]
    start = cli("evaluate", trained.json["run"], "--checkpoint", "initial", "--split", "test")
    assert start.code == 0, start.err
    assert start.out.startswith(
        f"evaluation of local:{trained.json['run']}, weights that it started with\n"
    )
    package = tmp_path / "package"
    make_package(cloudtrain.get_run(trained.json["run"]), package, ServingOptions())
    image = json.dumps({"inputs": [[[[0.5] * 8] * 8]]})
    argv = [sys.executable, "-c", SERVE, str(package), image]
    assert subprocess.check_output(argv, cwd=package / "code", text=True).split()[-1] == "2"


def checkpoints_of(run: str) -> str:
    return str(cloudtrain.get_run(run).plan_document()["config"]["checkpoint"]["uri"])


def accuracy(evaluation: dict[str, Any]) -> float:
    return float(evaluation["splits"]["test"]["metrics"]["accuracy"]["value"])
