"""Packages that a job's code imports, and the plan's warning about those that its image lacks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.jobs import EXAMPLES, Cli

from cloudtrain import catalog
from cloudtrain.features.serving.package import missing_packages
from cloudtrain.job.missing_packages import find_missing
from cloudtrain.job.requirements import read_requirements
from cloudtrain.job.static_analysis.conventions import read_conventions

JOB = """\
name: needs
code: {script: train.py}
cluster: {instance_type: ml.p4d.24xlarge, instances: 2, framework: "VERSION"}
"""
CODE = """\
import torch.distributed
import safetensors.torch
from torch.utils.tensorboard import SummaryWriter
import local_module, json
"""


def warnings_of(cli: Cli, path: Path, *options: str) -> list[str]:
    done = cli("plan", path, *options, "--json")
    assert done.code == 0, done.err
    return [text for text in done.json["warnings"] if "AWS's image" in text]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import a1.b, c1 as d\n", {"a1", "c1"}),
        ("from a1.b import c\n", {"a1"}),
        ("from . import a1\nfrom .b1 import c\n", set()),
        ("def main():\n    import a1\n", set()),
        ("def main():\n    import a1\nmain()\n", {"a1"}),
        ("try:\n    import a1\nexcept ImportError:\n    a1 = None\n", set()),
        ("try:\n    import a1\nfinally:\n    print()\n", {"a1"}),
        ("try:\n    import a1\nexcept ImportError:\n    raise SystemExit\n", {"a1"}),
        ("with open('x') as file:\n    import a1\n", {"a1"}),
        ("if TYPE_CHECKING:\n    import a1\n", set()),
        ("import importlib\nimportlib.import_module('a1')\n", {"a1"}),
        ("import distutils, json, tomllib\n", set()),
        ("from torch.utils.tensorboard import SummaryWriter\n", {"tensorboard"}),
        ("from torch.utils import tensorboard\nimport torch\n", {"tensorboard"}),
    ],
)
def test_certain_imports(tmp_path: Path, text: str, expected: set[str]) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "train.py").write_text(text)
    (code / "task.py").write_text(
        f"{text}from cloudtrain_runtime import Task\nclass A(Task): ...\n"
    )
    of_script = {name for name, _ in read_conventions(code, "train.py").imports}
    of_task = {name for name, _ in read_conventions(code, "task.py", task="A").imports}
    assert of_script - {"torch"} == of_task - {"torch"} == expected
    assert set(missing_packages(tmp_path, "task:A")) == expected
    # This Python may lack torch, and newer ones have no distutils.
    lacking = {each.module for each in find_missing(code / "train.py")}
    assert lacking <= {*expected, "torch", "distutils"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "accelerate>=1.10  # comment\n\nPyTorch_Lightning[extra]==2.6.4; python_version > '3.11'\n",
            True,
        ),
        (
            "--extra-index-url https://x/simple\naccelerate\npytorch.lightning @ https://x/y.whl\n",
            True,
        ),
        ("-r other.txt\naccelerate\n", False),
        ("-e .\n", False),
        ("./wheels/mine.whl\n", False),
        ("git+https://github.com/a/b\n", False),
    ],
)
def test_names_in_requirements(tmp_path: Path, text: str, expected: bool) -> None:
    (tmp_path / "r.txt").write_text(text)
    named = frozenset({"accelerate", "pytorch-lightning"})
    assert read_requirements(tmp_path, "r.txt").names == (named if expected else None)
    assert read_requirements(tmp_path, "missing.txt").names is None


def test_the_plan_names_missing_packages(cli: Cli, job: Callable[..., Path]) -> None:
    path = job(
        JOB.replace("VERSION", "2.13"), train_py=CODE, local_module_py="import transformers\n"
    )
    (warning,) = warnings_of(cli, path)
    assert warning == (
        "safetensors (train.py:2), tensorboard (train.py:3), transformers (local_module.py:1) are needed, and neither "
        "in AWS's image of PyTorch 2.13 nor in code.requirements: name them in a file, and the file in "
        "code.requirements"
    )
    assert warnings_of(cli, path, "--local") == []
    (older,) = warnings_of(
        cli, path, "--set", "cluster.framework=2.10"
    )  # has more packages than newer images
    assert older.startswith("transformers (local_module.py:1) is needed")


def test_requirements_bring_their_own(cli: Cli, job: Callable[..., Path]) -> None:
    path = job(JOB.replace("VERSION", "2.13"), train_py=CODE, local_module_py="import accelerate\n")
    use = ("--set", "code.requirements=requirements.txt")
    (path.parent / "requirements.txt").write_text("trl\n")
    (warning,) = warnings_of(cli, path, *use)
    assert warning.startswith("tensorboard (train.py:3) is needed")
    assert warning.endswith("add it to requirements.txt")
    (path.parent / "requirements.txt").write_text("trl\ntensorboard\n")
    assert warnings_of(cli, path, *use) == []
    (path.parent / "requirements.txt").write_text("-r others.txt\n")
    (path.parent / "others.txt").write_text("git+https://github.com/a/b\n")
    assert warnings_of(cli, path, *use) == []


OPTIONAL = """\
import torch.distributed
try:
    import apex
except ImportError:
    apex = None
try:
    import needed
except ImportError as error:
    raise SystemExit("pip install needed") from error
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import typed
from contextlib import suppress
with suppress(ImportError):
    import suppressed
def export():
    import exported
def main():
    import reached
    if torch.distributed.get_rank() == 0:
        import of_one_rank
if __name__ == "__main__":
    main()
"""


def test_only_what_certainly_runs_counts(cli: Cli, job: Callable[..., Path]) -> None:
    path = job(JOB.replace("VERSION", "2.13"), train_py=OPTIONAL, evaluate_py="import gradio\n")
    (warning,) = warnings_of(cli, path)
    assert warning.startswith("needed (train.py:7), reached (train.py:19) are needed, and neither")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("import cv2, hydra\n", "hydra-core (train.py:2), opencv-python-headless (train.py:2) are"),
        ("from google.cloud import storage\n", "google-cloud-storage (train.py:2) is"),
        ("import gradio.themes as g\nimport gradio\n", "gradio (train.py:2) is"),
        ("import importlib\nimportlib.import_module('gradio.x')\n", "gradio (train.py:3) is"),
    ],
)
def test_each_missing_package_has_its_line(
    cli: Cli, job: Callable[..., Path], text: str, named: str
) -> None:
    path = job(JOB.replace("VERSION", "2.13"), train_py=f"import torch.distributed\n{text}")
    (warning,) = warnings_of(cli, path)
    assert warning.startswith(named)


@pytest.mark.parametrize(
    "text",
    [
        "import yaml, PIL, sklearn, dateutil, mpl_toolkits.mplot3d, attr, pkg_resources, git\n",
        "from google.protobuf import text_format\nimport google.auth\n",
        "import distutils.util, imp, cgi, tomllib, __future__\n",
        "import nvidia.cudnn, torchvision, matplotlib.pyplot, omegaconf, einops, flash_attn, deepspeed\n",
        "import sys\nsys.path.append('vendor')\nimport vendored\n",
        "import importlib, sys\nimportlib.import_module(sys.argv[1])\n",
        "import pkg.inner\nfrom pkg import inner, something\n",
    ],
)
def test_what_is_there_is_not_missing(cli: Cli, job: Callable[..., Path], text: str) -> None:
    path = job(JOB.replace("VERSION", "2.13"), train_py=f"import torch.distributed\n{text}")
    for name in ("vendor/vendored.py", "pkg/__init__.py", "pkg/inner.py"):
        file = path.parent / name
        file.parent.mkdir(exist_ok=True)
        file.touch()
    assert warnings_of(cli, path) == []


def test_what_is_unknown_is_no_warning(cli: Cli, job: Callable[..., Path]) -> None:
    code = "import torch.distributed, gradio, numpy\n"
    path = job(JOB.replace("VERSION", "2.10"), train_py=code)
    use = ("--set", "code.requirements=requirements.txt")
    assert warnings_of(cli, path) == []
    (note,) = [each for each in _decisions(cli, path) if "gradio" in each]
    assert note.startswith("gradio (train.py:1): AWS publishes no complete list of the packages in")
    newer = ("--set", "cluster.framework=2.13")
    for text, words in (
        ("of-a-company\n", "It is unknown here what pip installs with of-a-company"),
        ("Trl[vllm]>=1\n", "It is unknown here what pip installs with trl[vllm]; if not these"),
        ("trl [vllm] @ git+https://a/b\n", "what pip installs with trl[vllm]; if not these"),
        ("git+https://github.com/a/b\n", "lines without a name of a package"),
    ):
        path.with_name("requirements.txt").write_text(text)
        assert warnings_of(cli, path, *newer, *use) == []
        (note,) = [each for each in _decisions(cli, path, *newer, *use) if "gradio" in each]
        assert words in note


def test_an_extra_hides_no_package_without_need(cli: Cli, job: Callable[..., Path]) -> None:
    path = job(JOB.replace("VERSION", "2.13"), train_py="import torch.distributed, gradio\n")
    path.with_name("requirements.txt").write_text("trl[]\n")
    (warning,) = warnings_of(cli, path, "--set", "code.requirements=requirements.txt")
    assert warning.startswith("gradio (train.py:1) is needed")


def _decisions(cli: Cli, path: Path, *options: str) -> list[str]:
    decisions: list[str] = cli("plan", path, *options, "--json").json["decisions"]
    return decisions


def test_an_installed_package_shows_what_it_brings(cli: Cli, job: Callable[..., Path]) -> None:
    code = "import torch.distributed, xmltodict, gradio\n"
    path = job(JOB.replace("VERSION", "2.13"), train_py=code)
    path.with_name("requirements.txt").write_text("moto\n")
    (warning,) = warnings_of(cli, path, "--set", "code.requirements=requirements.txt")
    assert warning.startswith("gradio (train.py:1) is needed")


def test_an_unknown_image_gives_no_warning(cli: Cli, job: Callable[..., Path]) -> None:
    path = job(JOB.replace("VERSION", "2.13"), train_py=CODE, local_module_py="")
    own = "123456789012.dkr.ecr.us-west-2.amazonaws.com/mine:1"
    assert (
        warnings_of(cli, path, "--set", f"cluster.image={own}", "--set", "cluster.framework=null")
        == []
    )


def test_features_of_a_task_need_packages(cli: Cli) -> None:
    job = EXAMPLES / "digits" / "job.yaml"
    assert warnings_of(cli, job) == []
    (warning,) = warnings_of(cli, job, "--set", "tracking.tensorboard=true")
    assert warning.startswith("tensorboard (tracking.tensorboard) is needed")
    (warning,) = warnings_of(cli, job, "--set", "train.init_from=s3://models/a/model.safetensors")
    assert warning.startswith("safetensors (train.init_from) is needed")


SERVER = "arn:aws:sagemaker:us-west-2:123456789012:mlflow-tracking-server/mine"


@pytest.mark.parametrize(
    ("version", "requirements", "is_warned"),
    [
        ("2.13", "", False),
        ("2.9", "", True),
        ("2.9", "SageMaker_MLflow>=0.1\n", False),
        ("2.9", "# sagemaker-mlflow\n", True),
        ("2.9", "-r more.txt\n", False),
    ],
)
def test_the_package_that_reaches_a_server_of_mlflow(
    cli: Cli, job: Callable[..., Path], version: str, requirements: str, is_warned: bool
) -> None:
    text = JOB.replace("VERSION", version).replace("train.py", "train.py, requirements: r.txt")
    path = job(f"{text}tracking: {{mlflow: '{SERVER}'}}\n", train_py="import torch.distributed\n")
    path.with_name("r.txt").write_text(requirements)
    path.with_name("more.txt").write_text("sagemaker-mlflow\n")
    found = "\n".join(cli("plan", path, "--json").json["warnings"])
    assert ("the image needs sagemaker-mlflow" in found) is is_warned


def test_an_own_module_hides_a_package(cli: Cli, job: Callable[..., Path]) -> None:
    path = job(JOB.replace("VERSION", "2.13"), train_py="import datasets\n", datasets_py="")
    assert warnings_of(cli, path) == []


def test_an_image_is_found_by_its_address() -> None:
    for image in catalog.images():
        for gpu in (True, False):
            uri = catalog.image_uri(image, region="us-west-2", gpu=gpu)
            assert catalog.find_image(uri) == image
