"""In a local run, `/opt/ml` is the folder of the instance, and not this machine's folder."""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.jobs import Cli

from cloudtrain.backends.container.ml_paths import map_hyperparameters, map_text, map_values
from cloudtrain.backends.container.mount_namespace import is_available
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
        (
            "/opt/ml/code/a:/opt/ml/code/b",
            "/run/hosts/algo-1/opt/ml/code/a:/run/hosts/algo-1/opt/ml/code/b",
        ),
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
    assert map_values(value, MlTree(Path("/t"))) == {
        "/opt/ml": ["/t/model", 3, None, {"a": "/t/a"}]
    }


def test_hyperparameters_of_an_estimator_are_mapped() -> None:
    given = {
        "sagemaker_submit_directory": '"/opt/ml/x"',
        "out": '"/opt/ml/model"',
        "raw": "/opt/ml/a",
        "lr": "0.10",
    }
    expected = {**given, "out": '"/t/model"', "raw": "/t/a"}
    assert map_hyperparameters(given, MlTree(Path("/t"))) == expected


def _packed(artifacts: dict[str, Any], name: str) -> dict[str, str]:
    with tarfile.open(artifacts[name]) as archive:
        files = {member.name: archive.extractfile(member) for member in archive.getmembers()}
        return {name: file.read().decode() for name, file in files.items() if file is not None}


@pytest.mark.processes
def test_arguments_of_a_script_are_mapped(cli: Cli, job: Callable[..., Path]) -> None:
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
    assert (
        json.loads((folder / "request.json").read_text())["Environment"]["RESULTS"]
        == "/opt/ml/output/data"
    )


@pytest.mark.processes
def test_arguments_of_a_task_are_mapped(cli: Cli, small: Callable[..., Path]) -> None:
    path = small()
    task = path.with_name("small.py")
    arguments = "import json\n" + task.read_text().replace(
        "self, seconds", "self, folders, seconds"
    )
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


LITERAL = """\
import os
from pathlib import Path

print("reads", Path("/opt/ml/input/data/train/x.txt").read_text())
Path("/opt/ml/model/model.txt").write_text(os.environ["SM_CURRENT_HOST"])
print("user", os.getuid(), "tree", os.path.samefile("/opt/ml", os.environ["CLOUDTRAIN_ML_ROOT"]))
"""
LITERAL_JOB = (
    JOB.partition("  args:")[0]
    + "  env: {}\n"
    + JOB[JOB.index("cluster:") :]
    + "data: {train: data}\n"
)
HAS_NAMESPACE = is_available()


@pytest.fixture
def literal(job: Callable[..., Path]) -> Path:
    path = job(LITERAL_JOB, train_py=LITERAL)
    (path.parent / "data").mkdir()
    (path.parent / "data" / "x.txt").write_text("a sample")
    return path


@pytest.mark.processes
@pytest.mark.skipif(not HAS_NAMESPACE, reason="NOT TESTED: this machine allows no mount namespace")
def test_opt_ml_in_the_code_is_the_instances_folder(cli: Cli, literal: Path) -> None:
    before = sorted(path.name for path in Path("/opt").iterdir())
    plan = cli("plan", literal, "--local", "--json").json
    assert any("own folder everywhere" in text for text in plan["decisions"])
    assert not any("/opt/ml in the code" in text for text in plan["warnings"])
    done = cli("submit", literal, "--local", "--follow", "--json")
    assert done.code == 0, done.err
    assert done.err.count("reads a sample") == 2
    assert done.err.count(f"user {os.getuid()} tree True") == 2
    assert _packed(done.json["artifacts"], "model") == {"model.txt": "algo-1"}
    assert sorted(path.name for path in Path("/opt").iterdir()) == before


STORING = """\
import json, os, sys
from pathlib import Path

state = Path("/opt/ml/checkpoints/state.json")
names = ("SM_MODEL_DIR", "SM_OUTPUT_DATA_DIR", "SM_CHANNEL_TRAIN", "CLOUDTRAIN_ML_ROOT")
found = {name: os.environ[name] for name in names}
found |= {"folder": os.getcwd(), "script": __file__}
found |= {f"real {name}": os.path.realpath(found[name]) for name in list(found)}
found["real checkpoints"] = os.path.realpath(state.parent)
if not state.exists():
    state.write_text(json.dumps(found))
    sys.exit("interrupted")
stored = json.loads(state.read_text())
print("CHANGED", {name for name in found if found[name] != stored[name]})
Path(stored["real SM_MODEL_DIR"], "model.txt").write_text("model")
Path(stored["real checkpoints"], "second.txt").write_text("second")
Path("runs", "saved.txt").write_text("kept")
"""
STORING_JOB = """\
name: storing
code: {script: train.py, outputs: [runs/]}
cluster: {instance_type: ml.g5.xlarge, processes_per_instance: 1}
data: {train: data}
"""


def contents_of(folder: Path) -> dict[str, bytes]:
    files = (each for each in folder.rglob("*") if each.is_file())
    return {str(each.relative_to(folder)): each.read_bytes() for each in files}


@pytest.mark.processes
@pytest.mark.skipif(not HAS_NAMESPACE, reason="NOT TESTED: this machine allows no mount namespace")
def test_stored_paths_lead_to_the_resumed_run(cli: Cli, job: Callable[..., Path]) -> None:
    path = job(STORING_JOB, train_py=STORING)
    (path.parent / "data").mkdir()
    (path.parent / "data" / "x.txt").write_text("a sample")
    first = cli("submit", path, "--local", "--follow", "--json").json
    old = Path(first["artifacts"]["folder"]) / "hosts"
    before = contents_of(old)
    done = cli("resume", first["run"], "--follow", "--json")
    assert done.code == 0, done.err
    assert "CHANGED set()" in done.err
    assert contents_of(old) == before
    assert _packed(done.json["artifacts"], "model") == {"model.txt": "model"}
    new = Path(done.json["artifacts"]["folder"])
    # Other programs of the machine find everything in the run's folder.
    tree = MlTree(new / "hosts" / "algo-1" / "opt" / "ml")
    assert (tree.code / "runs" / "saved.txt").read_text() == "kept"
    assert (tree.checkpoints / "second.txt").read_text() == "second"
    assert (tree.data / "train" / "x.txt").read_text() == "a sample"
    assert not any("not kept" in text for text in done.json["warnings"])


@pytest.mark.processes
def test_without_a_namespace_the_plan_names_the_lines(cli: Cli, literal: Path) -> None:
    off = {"CLOUDTRAIN_ML_NAMESPACE": "off"}
    plan = cli("plan", literal, "--local", "--json", environ=off).json
    assert any("in code.args and code.env" in text for text in plan["decisions"])
    warning = next(text for text in plan["warnings"] if "/opt/ml in the code" in text)
    assert warning.startswith("train.py:4, train.py:5, train.py:6: ")
    assert not any(
        "/opt/ml in the code" in text for text in cli("plan", literal, "--json").json["warnings"]
    )
    done = cli("submit", literal, "--local", "--follow", "--json", environ=off)
    assert done.code == 4, done.err
    assert "FileNotFoundError" in done.err


def test_the_plan_also_reads_the_source_of_a_task(cli: Cli, small: Callable[..., Path]) -> None:
    path = small()
    task = path.with_name("small.py")
    task.write_text(
        task.read_text().replace("import torch\n", "import torch\nPLACE = '/opt/ml/output'\n", 1)
    )
    plan = cli("plan", path, "--local", "--json", environ={"CLOUDTRAIN_ML_NAMESPACE": "off"}).json
    assert any(text.startswith("small.py:4: /opt/ml in the code") for text in plan["warnings"])
