"""What to do depends on where the run ran and on what its job says."""

from __future__ import annotations

import pytest

from cloudtrain.console.runs import next_step
from cloudtrain.failure_rules import Explanation, FailureClass, explain_run
from cloudtrain.runs.log_lines import LogLine
from cloudtrain.runs.progress import Progress
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


def failed(*lines: str, backend: str = "local", reason: str = "") -> Explanation:
    """Explain a run that ended with these lines."""
    read = [LogLine("algo-1", text) for text in lines]
    return explain_run(Status("r", backend, State.FAILED, reason), read)


TRACEBACK = "Traceback (most recent call last):"
FRAME = '  File "/opt/ml/code/train.py", line 3, in <module>'
UNSUPPORTED = (
    "_pickle.UnpicklingError: Weights only load failed. This file can still be loaded, to do so you have two options.",
    "\t(1) In PyTorch 2.6, we changed the default value of the `weights_only` argument in `torch.load`.",
    "\tWeightsUnpickler error: Unsupported global: GLOBAL argparse.Namespace was not an allowed global by default.",
)
PROGRAM = (
    '  File "/usr/lib/python3.11/subprocess.py", line 1953, in _execute_child',
    "    raise child_exception_type(errno_num, err_msg, err_filename)",
    "FileNotFoundError: [Errno 2] No such file or directory: 'numactl'",
)
COMMAND = (
    '  File "/opt/conda/bin/yolo", line 8, in <module>',
    "    sys.exit(entrypoint())",
    '  File "/opt/conda/lib/python3.11/site-packages/ultralytics/cfg/__init__.py", line 12, in entrypoint',
    "    raise SyntaxError(message)",
    "SyntaxError: 'imgs=640' is not a valid YOLO argument.",
)
HUB = "We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find them in the cached files."


REPOSITORY = (
    "huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': "
    "'/opt/ml/input/data/model/llama'. Use `repo_type` argument if needed."
)
HALF = (
    "FileNotFoundError: [Errno 2] No such file or directory: "
    "'/opt/ml/checkpoints/checkpoint-20/trainer_state.json'"
)


@pytest.mark.parametrize(
    ("lines", "failure", "said", "unsaid"),
    [
        (UNSUPPORTED, "user_code", "torch.load refuses argparse.Namespace", "resume from"),
        (
            ("_pickle.UnpicklingError: Weights only load failed. Re-running may help.",),
            "user_code",
            "weights_only=False",
            "resume from",
        ),
        (
            ("_pickle.UnpicklingError: invalid load key, 'v'.",),
            "checkpoint",
            "git lfs pull",
            "older step",
        ),
        (
            (
                "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory",
            ),
            "checkpoint",
            "resume from an older step",
            "another model",
        ),
        (
            ("RuntimeError: Error(s) in loading state_dict for GPT:",),
            "checkpoint",
            "of another model",
            "cut off",
        ),
        (
            (
                "RuntimeError: Dataset not found or corrupted. You can use download=True to download it",
            ),
            "data",
            "torchvision found no dataset",
            "decoded",
        ),
        (
            ("OSError: image file is truncated (3 bytes not processed)",),
            "data",
            "find it by train.py:3",
            "One sample is",
        ),
        (
            (REPOSITORY,),
            "data",
            "/opt/ml/input/data/model/llama was taken for a model of the Hub",
            "cannot reach",
        ),
        (
            (
                "OSError: Incorrect path_or_model_id: './llama'. Please provide either the path to a local folder",
            ),
            "data",
            "./llama was taken for a model of the Hub",
            "cannot reach",
        ),
        ((f"OSError: {HUB}",), "data", "cannot reach that address", "was taken for"),
        (PROGRAM, "user_code", "The program numactl is not installed", "bundle"),
        (
            ("FileNotFoundError: [Errno 2] No such file or directory: 'data/train.csv'",),
            "data",
            "data/train.csv is not in the folder in which the job runs. Name its folder in the job file",
            "mounted",
        ),
        (
            ("requests.exceptions.JSONDecodeError: Expecting value: line 1 column 1 (char 0)",),
            "user_code",
            "Fix train.py:3.",
            "decoded",
        ),
        (
            (
                "wandb.errors.errors.UsageError: No API key configured. Use `wandb login` to log in.",
            ),
            "user_code",
            "code.env.WANDB_API_KEY",
            "Fix train.py",
        ),
        (
            ("ModuleNotFoundError: No module named 'transformers.models.qwen9'",),
            "dependency_install",
            "transformers is there, but has no models.qwen9",
            "pip install",
        ),
        (
            (HALF,),
            "checkpoint",
            "checkpoint-20 is half a checkpoint",
            "channel",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_advice_has_evidence(
    lines: tuple[str, ...], failure: str, said: str, unsaid: str
) -> None:
    found = failed(TRACEBACK, FRAME, *lines)
    assert (found.failure, found.traceback != ()) == (failure, True)
    assert said in found.action
    assert unsaid not in found.action


def test_the_script_of_a_command_is_not_the_jobs_code() -> None:
    found = failed(TRACEBACK, *COMMAND)
    assert (found.failure, found.action) == ("user_code", "Fix what the message names.")


@pytest.mark.parametrize(
    ("line", "failure"),
    [
        ("rank 1 on algo-1 (local rank 1) was killed by SIGKILL", "killed"),
        (
            "rank 1 on algo-1 (local rank 1) was killed by SIGKILL; the kernel has ended 2 processes for lack of memory",
            "host_memory",
        ),
        ("Memory cgroup out of memory: Killed process 31 (python)", "host_memory"),
        ("train.sh: line 3:    27 Killed                  python train.py", "killed"),
        ("train.sh: line 3: numactl: command not found", "user_code"),
        ("sh: 1: numactl: not found", "user_code"),
    ],
)
def test_a_killed_process_lacked_memory_if_the_kernel_says_so(line: str, failure: str) -> None:
    found = failed(line)
    assert found.failure == failure
    assert ("Find out who sent SIGKILL" in found.action) == (failure == "killed")
    assert ("The program numactl is not installed" in found.action) == (failure == "user_code")


@pytest.mark.parametrize(
    "reason",
    [
        "Data download failed:Unable to locate credentials",
        "ClientError: Data download failed:An error occurred (ExpiredToken) when calling the ListObjectsV2 operation",
    ],
)
def test_a_channel_without_credentials_has_no_wrong_address(reason: str) -> None:
    found = failed(backend="sandbox", reason=reason)
    assert found.failure is FailureClass.IAM
    assert found.action.startswith("Sign in to AWS on this machine")
    assert "address" not in found.action


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


def in_package(code: str, *lines: str, file: str = "lib/core.py") -> Explanation:
    """Explain an error that a package has raised below this line of train.py."""
    path = f"/opt/conda/lib/python3.11/site-packages/{file}"
    frames = (FRAME, f"    {code}", f'  File "{path}", line 9, in check', "    fail()")
    return failed(TRACEBACK, *frames, *lines)


@pytest.mark.parametrize(
    ("message", "package"),
    [
        ("ImportError: Missing optional dependency 'openpyxl'.  Use pip or conda", "openpyxl"),
        (
            "ImportError: it requires the following packages that were not found in your environment: einops, flash_attn. Run",
            "einops, flash_attn",
        ),
        (
            "ImportError: it cannot be used: the package flash_attn seems to be not installed.",
            "flash_attn",
        ),
        (
            "ModuleNotFoundError: Neither `tensorboard` nor `tensorboardX` is available.",
            "tensorboard",
        ),
        (
            "RuntimeError: TensorBoardCallback requires tensorboard to be installed.",
            "tensorboard",
        ),
        (
            "ImportError: X requires the SentencePiece library but it was not found",
            "SentencePiece",
        ),
        ("RuntimeError: for this, run pip install 'zstandard>=0.22'.", "zstandard>=0.22"),
        ("ValueError: use `pip install tf-keras`.", "tf-keras"),
    ],
)
def test_a_package_that_another_asks_for_is_named(message: str, package: str) -> None:
    found = in_package("run()", message)
    assert found.failure is FailureClass.DEPENDENCY_INSTALL
    assert f"install {package} here by pip" in found.action


@pytest.mark.parametrize(
    "message",
    [
        "RuntimeError: this requires CUDA to be installed",
        "ImportError: X requires the PyTorch library but it was not found",
        "RuntimeError: run pip install -r requirements.txt",
        "RuntimeError: run pip install git+https://example.com/x",
        "ValueError: the format requires two columns",
    ],
)
def test_not_each_word_after_requires_is_a_package(message: str) -> None:
    assert in_package("run()", message).action.startswith("Fix train.py:3")


@pytest.mark.parametrize(
    "message",
    [
        "AttributeError: module 'torch.library' has no attribute 'register_fake'",
        "TypeError: 'type' object is not subscriptable",
        "ImportError: cannot import name 'x' from 'lib.y' (/opt/conda/lib/python3.11/site-packages/lib/y.py)",
        "OSError: /opt/conda/lib/python3.11/site-packages/a/liba.so: undefined symbol: _ZNK3c105",
        "ImportError: /lib/libstdc++.so.6: version `GLIBCXX_3.4.30' not found (required by x.so)",
    ],
)
def test_an_import_that_fails_in_a_package_blames_packages(message: str) -> None:
    found = in_package("from lib import core", message)
    assert found.failure is FailureClass.DEPENDENCY_INSTALL
    assert "Fix train.py" not in found.action
    assert "code.requirements" in found.action


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("run(3)", "TypeError: 'type' object is not subscriptable"),
        ("import lib", "KeyError: 'LICENCE'"),
        ("importer.run()", "AttributeError: 'NoneType' object has no attribute 'x'"),
    ],
)
def test_other_errors_below_a_line_of_the_job_name_it(code: str, message: str) -> None:
    assert in_package(code, message).action.startswith("Fix train.py:3")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ('"base.yaml"', "base.yaml is no YAML: fix it at line 4"),
        ('"<unicode string>"', "Fix train.py:3"),
    ],
)
def test_a_file_that_is_no_yaml_is_named(source: str, said: str) -> None:
    found = in_package(
        "load()", "yaml.scanner.ScannerError: bad", f"  in {source}, line 4, column 9"
    )
    assert found.action.startswith(said)


def test_code_of_the_hub_is_not_the_jobs_code() -> None:
    remote = "/root/.cache/huggingface/modules/transformers_modules/org/m/modeling.py"
    frames = (FRAME, "    model(x)", f'  File "{remote}", line 44, in forward', "    past.length()")
    found = failed(TRACEBACK, *frames, "AttributeError: 'Cache' object has no attribute 'length'")
    assert found.place == "train.py:3"


def test_a_package_that_hides_a_module_of_the_bundle_is_named() -> None:
    error = "ImportError: cannot import name 'x' from 'utils' (/opt/lib/site-packages/utils/__init__.py)"
    hidden = explained(error, "sagemaker", {"module:utils": "src/utils"}).action
    assert hidden.startswith("An installed package is named utils, too, and hides src/utils")
    assert explained(error, "sagemaker").action.startswith("The installed utils has no x")


@pytest.mark.parametrize(
    ("message", "failure", "said"),
    [
        ("RuntimeError: Driver/library version mismatch", "service", "this machine"),
        (
            "ValueError: Your setup doesn't support bf16/gpu.",
            "user_code",
            "none at all, or one older",
        ),
        (
            "Py4JJavaError: java.lang.OutOfMemoryError: Java heap space",
            "host_memory",
            "Java process",
        ),
        (
            "RuntimeError: ifa != nullptr. Unable to find address for: ens5",
            "nccl",
            "GLOO_SOCKET_IFNAME",
        ),
        ("FloatingPointError: Minimum loss scale reached (0.0001).", "user_code", "In fp16"),
        (
            "ValueError: loaded state dict has a different number of parameter groups",
            "checkpoint",
            "is of other parameters",
        ),
        (
            "RuntimeError: The detected CUDA version (11.8) mismatches the version that was used to compile PyTorch (12.1).",
            "dependency_install",
            "of CUDA 11.8, while PyTorch was built for 12.1",
        ),
        (
            "OSError: libsndfile.so.1: cannot open shared object file: No such file or directory",
            "dependency_install",
            "The system library libsndfile.so.1",
        ),
        (
            "TypeError: GPT.forward() got an unexpected keyword argument 'labels'",
            "user_code",
            "If GPT.forward or labels comes from the job's code, fix it",
        ),
        (
            "RuntimeError: Unable to find a valid cuDNN algorithm to run convolution",
            "unknown",
            "most often too little GPU memory",
        ),
        (
            "ConnectionError: Couldn't reach 'a/b' on the Hub (SSLError)",
            "data",
            "cannot reach that address",
        ),
        (
            "ValueError: environment variable MASTER_ADDR expected, but not set",
            "user_code",
            "A process group needs MASTER_ADDR",
        ),
        (
            "ConnectionError: HTTPConnectionPool(host='localhost', port=80): Read timed out.",
            "user_code",
            "Fix train.py:3",
        ),
    ],
)
def test_the_message_decides_not_the_line(message: str, failure: str, said: str) -> None:
    found = in_package("run()", message)
    assert found.failure == failure
    assert said in found.action


def test_a_module_that_its_package_has_lost_is_pinned() -> None:
    error = "ModuleNotFoundError: No module named 'pkg_resources'"
    assert "(pip install 'setuptools<82')" in explained(error).action
    assert "Add setuptools<82 to" in explained(error, "sagemaker", REQUIREMENTS).action


@pytest.mark.parametrize("backend", ["local", "sagemaker"])
def test_a_module_of_the_bundle_is_no_missing_package(backend: str) -> None:
    facts = {**REQUIREMENTS, "module:utils": "src/lib/utils", "module:lib": "src/lib"}
    found = explained("ModuleNotFoundError: No module named 'utils'", backend, facts).action
    assert found.startswith("utils is src/lib/utils of the bundle, and no package is missing")
    assert found.endswith("code.env {PYTHONPATH: src/lib}.")


def test_of_equal_errors_the_rank_of_the_status_is_named() -> None:
    lines = [
        LogLine(f"algo-{rank // 2 + 1}", text, 1000.0 + order)
        for order, rank in enumerate((3, 1, 0))
        for text in (
            f"[rank{rank}]: {TRACEBACK}",
            f"[rank{rank}]: {FRAME}",
            f"[rank{rank}]: ValueError: 3",
        )
    ]
    reason = "rank 1 on algo-1 (local rank 1) failed: ValueError: 3"
    found = explain_run(Status("r", "local", State.FAILED, reason), lines)
    assert (found.rank, found.host, found.ranks) == (1, "algo-1", (0, 1, 3))
    other = explain_run(Status("r", "local", State.FAILED, "rank 2 on algo-2 failed"), lines)
    assert (other.rank, other.host) == (3, "algo-2")


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


EARLIER = "demo-261120-074318-1a2b3c"


@pytest.mark.parametrize("failure", FailureClass)
def test_the_next_command_never_runs_the_same_mistake_again(failure: FailureClass) -> None:
    progress = Progress(checkpoint="file:///saved/step-00000004")
    status = Status("demo-261121-074318-1a2b3c", "local", State.FAILED, progress=progress)
    cause = Explanation(status.run, State.FAILED, failure, "", place="train.py:3")
    found = next_step(status, "job.yaml", cause).text
    if failure.is_in_the_job:
        again = f"cloudtrain submit job.yaml --local --continue {status.run}"
        fault = "it" if failure in ("dependency_install", "image_pull") else "train.py:3"
        assert found == f"fix {fault}, then: {again}"
    else:
        assert found == f"cloudtrain resume {status.reference}"


@pytest.mark.parametrize("failure", FailureClass)
def test_the_next_command_begins_where_a_resumed_run_began(failure: FailureClass) -> None:
    status = Status("demo-261121-074318-1a2b3c", "local", State.FAILED)
    cause = Explanation(status.run, State.FAILED, failure, "", place="train.py:3")
    found = next_step(status, "job.yaml", cause, {"checkpoint.resume_run": EARLIER}).text
    if failure.is_in_the_job:
        assert found.endswith(f"cloudtrain submit job.yaml --local --continue {EARLIER}")
    else:
        assert found == f"cloudtrain resume {status.reference} --set checkpoint.resume={EARLIER}"
