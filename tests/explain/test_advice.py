"""What to do depends on where the run ran and on what its job says."""

from __future__ import annotations

import pytest

from cloudtrain.failure_rules import Explanation, FailureClass, explain_run
from cloudtrain.runs.log_lines import LogLine
from cloudtrain.runs.status import State, Status

REQUIREMENTS = {"code.requirements": "requirements.txt"}


def explained(
    error: str, backend: str = "local", facts: dict[str, str] | None = None
) -> Explanation:
    lines = [
        "Traceback (most recent call last):",
        '  File "/opt/ml/code/train.py", line 3, in <module>',
        error,
    ]
    read = [LogLine("algo-1", text) for text in lines]
    return explain_run(Status("r", backend, State.FAILED), read, facts)


@pytest.mark.parametrize(
    ("module", "distribution"),
    [
        ("cv2", "opencv-python-headless"),
        ("sklearn", "scikit-learn"),
        ("PIL", "pillow"),
        ("yaml", "pyyaml"),
        ("sagemaker_training", "sagemaker-training"),
        ("einops", "einops"),
    ],
)
def test_a_missing_module_is_named_by_its_distribution(module: str, distribution: str) -> None:
    error = f"ModuleNotFoundError: No module named '{module}'"
    here = explained(error, facts=REQUIREMENTS)
    assert here.failure is FailureClass.DEPENDENCY_INSTALL
    assert here.action.startswith(
        "Without --install, local runs do not install requirements.txt: pip install -r"
    )
    assert f"(add {distribution} to it" in here.action
    assert explained(error).action.startswith(f"Install it here (pip install {distribution}),")
    assert (
        f"Add {distribution} to code.requirements"
        in explained(error, "sagemaker", REQUIREMENTS).action
    )


def test_a_local_run_is_not_told_to_run_locally() -> None:
    assert explained("ValueError: 3").action == "Fix train.py:3."
    assert explained("ValueError: 3", "sandbox").action.endswith("cloudtrain submit JOB --local.")


@pytest.mark.parametrize(
    "error",
    [
        "RuntimeError: Found no NVIDIA driver on your system.",
        "RuntimeError: No CUDA GPUs are available",
    ],
)
def test_no_driver_here_is_no_gpu_here(error: str) -> None:
    found = explained(error)
    assert found.failure is FailureClass.USER_CODE
    assert found.action.startswith("This machine has no GPU")
    assert explained(error, "sagemaker").failure is FailureClass.IMAGE_PULL


@pytest.mark.parametrize(
    "error",
    [
        "AttributeError: module 'torch._C' has no attribute '_cuda_setDevice'",
        "RuntimeError: Distributed package doesn't have NCCL built in",
        "ValueError: DistributedDataParallel device_ids and output_device arguments only work with single-device GPUs",
    ],
)
def test_a_torch_without_cuda_is_no_gpu_here(error: str) -> None:
    assert explained(error).action.startswith("This machine has no GPU")
    assert explained(error).failure is FailureClass.USER_CODE


def test_a_module_beside_a_nested_script_needs_a_path() -> None:
    error = "ModuleNotFoundError: No module named 'mingpt'"
    assert (
        "PYTHONPATH: ." in explained(error, facts={"code.script": "projects/chat/train.py"}).action
    )
    assert "PYTHONPATH" not in explained(error, facts={"code.script": "train.py"}).action


def test_a_file_that_stayed_behind_is_named() -> None:
    error = "OSError: Error no file named model.safetensors, or pytorch_model.bin, found in directory tiny."
    action = explained(error, facts={"left_out:tiny/model.safetensors": "a model"}).action
    assert action.startswith("tiny/model.safetensors is not in the bundle (a model)")
    assert explained(error, facts={"left_out:other.bin": "data"}).action == "Fix train.py:3."


@pytest.mark.parametrize(
    "error",
    [
        "RuntimeError: Error downloading train-images-idx3-ubyte.gz",
        "urllib.error.URLError: <urlopen error timed out>",
        "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='x'): Max retries exceeded with url: /",
        "OSError: We couldn't connect to 'https://huggingface.co' to load the files",
    ],
)
def test_a_download_without_network_is_recognised(error: str) -> None:
    assert explained(error).failure is FailureClass.DATA
    assert explained(error).action.startswith("This machine cannot reach that address")
    assert explained(error, "sagemaker").action.startswith(
        "The container cannot reach that address"
    )


@pytest.mark.parametrize("backend", ["local", "sagemaker"])
def test_what_stayed_behind_is_named_with_its_rule(backend: str) -> None:
    facts = {
        "left_out:lib/helper.py": ".gitignore:2 helper.py",
        "left_out:configs/": "results and data",
    }
    module = explained("ModuleNotFoundError: No module named 'helper'", backend, facts)
    assert module.action.startswith("lib/helper.py is not in the bundle (.gitignore:2 helper.py)")
    for path in ("configs/base.yaml", "/run/opt/ml/code/configs/a/b.yaml"):
        error = f"FileNotFoundError: [Errno 2] No such file or directory: '{path}'"
        assert explained(error, backend, facts).action.startswith("configs/ is not in the bundle")
    other = explained(
        "FileNotFoundError: [Errno 2] No such file or directory: '/configs/a.yaml'", backend, facts
    )
    assert "is not in the bundle" not in other.action


def test_a_literal_path_of_a_channel_names_its_variable() -> None:
    error = (
        "FileNotFoundError: [Errno 2] No such file or directory: '/opt/ml/input/data/train/x.csv'"
    )
    assert "Read SM_CHANNEL_TRAIN for its folder" in explained(error).action
    assert "/opt/ml/input/data/<channel>" in explained(error, "sagemaker").action
    model = explained(
        "FileNotFoundError: [Errno 2] No such file or directory: '/opt/ml/model/a.pt'"
    )
    assert "SM_MODEL_DIR" in model.action
