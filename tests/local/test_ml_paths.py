"""`/opt/ml` in a local run is the folder of its instance, and never this machine's."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import Cli

from cloudtrain.container.paths import map_hyperparameters, map_text, map_values
from cloudtrain_runtime.contract import MlTree

SCRIPT = """\
import os, sys
from pathlib import Path

out = Path(sys.argv[sys.argv.index("--out") + 1])
out.joinpath("model.txt").write_text(os.environ["SM_CURRENT_HOST"])
Path(os.environ["RESULTS"], "result.txt").write_text("result")
Path(sys.argv[-1].partition("=")[2], "data.txt").write_text("data")
print("SM_USER_ARGS names it:", f'"{out}"' in os.environ["SM_USER_ARGS"])
"""
JOB = """\
name: paths
code:
  script: train.py
  args: [--out, /opt/ml/model, --data=/opt/ml/output/data]
  env: {RESULTS: /opt/ml/output/data}
cluster: {instance_type: ml.g5.xlarge, instances: 2, processes_per_instance: 1}
"""
TREE = MlTree(Path("/run/hosts/algo-1/opt/ml"))


@pytest.mark.parametrize(
    ("text", "mapped"),
    [
        ("/opt/ml", "/run/hosts/algo-1/opt/ml"),
        ("/opt/ml/model", "/run/hosts/algo-1/opt/ml/model"),
        ("--out=/opt/ml/model", "--out=/run/hosts/algo-1/opt/ml/model"),
        ("/opt/ml/code/a:/opt/ml/code/b", "/run/hosts/algo-1/opt/ml/code/a:/run/hosts/algo-1/opt/ml/code/b"),
        ("file:///opt/ml/output", "file:///run/hosts/algo-1/opt/ml/output"),
        ("/opt/mlflow", "/opt/mlflow"),
        ("/mnt/opt/ml/model", "/mnt/opt/ml/model"),
        ("s3://bucket/opt/ml/model", "s3://bucket/opt/ml/model"),
    ],
)
def test_a_leading_opt_ml_is_mapped(text: str, mapped: str) -> None:
    assert map_text(text, TREE) == mapped


def test_nested_values_are_mapped_and_keys_are_not() -> None:
    value = {"/opt/ml": ["/opt/ml/model", 3, None, {"a": "/opt/ml/a"}]}
    assert map_values(value, MlTree(Path("/t"))) == {"/opt/ml": ["/t/model", 3, None, {"a": "/t/a"}]}


def test_hyperparameters_of_an_estimator_are_mapped() -> None:
    given = {"sagemaker_submit_directory": '"/opt/ml/x"', "out": '"/opt/ml/model"', "raw": "/opt/ml/a", "lr": "0.10"}
    expected = {**given, "out": '"/t/model"', "raw": "/t/a"}
    assert map_hyperparameters(given, MlTree(Path("/t"))) == expected


def _packed(artifacts: dict[str, Any], name: str) -> dict[str, str]:
    with tarfile.open(artifacts[name]) as archive:
        files = {member.name: archive.extractfile(member) for member in archive.getmembers()}
        return {name: file.read().decode() for name, file in files.items() if file is not None}


@pytest.mark.processes
def test_a_scripts_arguments_name_the_instances_folder(cli: Cli, job: Callable[..., Path]) -> None:
    path = job(JOB, train_py=SCRIPT)
    done = cli("submit", path, "--local", "--follow", "--json")
    assert done.code == 0, done.err
    artifacts = done.json["artifacts"]
    assert _packed(artifacts, "model") == {"model.txt": "algo-1"}
    assert _packed(artifacts, "output") == {"result.txt": "result", "data.txt": "data"}
    folder = Path(artifacts["folder"])
    assert (folder / "hosts/algo-2/opt/ml/model/model.txt").read_text() == "algo-2"
    assert "SM_USER_ARGS names it: True" in done.err
    config = json.loads((folder / "config" / "run.json").read_text())
    assert config["args"] == ["--out", "/opt/ml/model", "--data=/opt/ml/output/data"]
    assert json.loads((folder / "request.json").read_text())["Environment"]["RESULTS"] == "/opt/ml/output/data"


@pytest.mark.processes
def test_a_tasks_arguments_name_the_instances_folder(cli: Cli, small: Callable[..., Path]) -> None:
    path = small()
    task = path.with_name("small.py")
    arguments = "import json\n" + task.read_text().replace("self, seconds", "self, folders, seconds")
    task.write_text(
        arguments.replace(
            "        self.seconds, self.fail_at",
            '        open(folders["out"][0] + "/task.txt", "w").write("task")\n        self.seconds, self.fail_at',
        )
    )
    folders = "--set=code.args.folders={out: [/opt/ml/output/data]}"
    done = cli("submit", path, "--local", "--follow", "--json", folders)
    assert done.code == 0, done.err
    assert _packed(done.json["artifacts"], "output")["task.txt"] == "task"
