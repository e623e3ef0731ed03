"""The background import of the SageMaker SDK: no side effects, and no waiting for it in vain."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.jobs import EXAMPLES, Cli, command

pytestmark = pytest.mark.aws

JOB = EXAMPLES / "digits" / "job.yaml"
PARTS = {
    "__init__": "",
    "utils": "def validate_sagemaker_config(config=None): ...",
    "estimator": "",
    "debugger/__init__": "",
    "debugger/debugger": "TensorBoardOutputConfig = None",
    "inputs": "FileSystemInput = TrainingInput = None",
    "pytorch/__init__": "",
    "pytorch/estimator": "PyTorch = 'found'",
    "session": "Session = None",
}
"""Modules of the SDK that cloudtrain imports."""


def run(program: str, folder: Path | None = None) -> str:
    """Run a program in a separate process; return its standard output."""
    path = os.pathsep.join([*([str(folder)] if folder else []), os.environ["PYTHONPATH"]])
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def fake_sdk(tmp_path: Path) -> Callable[..., Path]:
    """Write a package `sagemaker` that is found before the real one; return its folder."""

    def write(**parts: str) -> Path:
        folder = tmp_path / "fake-sdk"
        for name, text in {**PARTS, **parts}.items():
            path = folder / "sagemaker" / f"{name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return folder

    return write


@pytest.fixture
def endless(fake_sdk: Callable[..., Path], tmp_path: Path) -> tuple[dict[str, str], Path]:
    """Create an SDK whose import never ends; return its environment, and a file that exists once it has started."""
    begun = tmp_path / "begun"
    folder = fake_sdk(
        __init__=f"import threading\nopen({str(begun)!r}, 'w').close()\nthreading.Event().wait()\n"
    )
    return {"PYTHONPATH": os.pathsep.join([str(folder), os.environ["PYTHONPATH"]])}, begun


def test_a_submit_that_fails_does_not_wait_for_the_import(
    cli_process: Cli, aws: dict[str, str], endless: tuple[dict[str, str], Path]
) -> None:
    environ, begun = endless
    done = cli_process("submit", JOB, environ={**environ, "CLOUDTRAIN_BUCKET": "not-there"})
    assert done.code == 3, done.err
    assert "there is no bucket not-there" in done.err
    assert begun.exists()


def test_an_invalid_job_starts_no_import(
    cli_process: Cli, aws: dict[str, str], endless: tuple[dict[str, str], Path]
) -> None:
    environ, begun = endless
    assert cli_process("submit", JOB, "--set", "train.epochs=none", environ=environ).code == 2
    assert (
        cli_process("submit", JOB, "--set", "code.directory=not-there", environ=environ).code == 2
    )
    assert not begun.exists()


def test_the_transport_without_the_sdk_imports_none(
    cli_process: Cli, aws: dict[str, str], endless: tuple[dict[str, str], Path]
) -> None:
    environ, begun = endless
    done = cli_process(
        "submit", JOB, "--skip-check", environ={**environ, "CLOUDTRAIN_TRANSPORT": "boto3"}
    )
    assert done.code == 0, done.err
    assert not begun.exists()


def test_a_submit_prints_its_own_lines_only(cli_process: Cli, aws: dict[str, str]) -> None:
    done = cli_process("submit", JOB, "--skip-check", "--json")
    assert done.code == 0, done.err
    run = json.loads(done.out)["run"]
    words = [" ".join(line.split()[-2:]) for line in done.err.splitlines()]
    assert words == [
        f"sagemaker:{run} submitted",
        f"status sagemaker:{run}",
        f"follow sagemaker:{run}",
        f"stop sagemaker:{run}",
    ]


def test_last_lines_are_flushed_to_a_block_buffered_output(aws: dict[str, str]) -> None:
    """The process exits without the interpreter's shutdown, which would flush them."""
    words = f"{command()} submit {JOB} --skip-check --json | cat"
    done = subprocess.run(
        ["bash", "-c", words], capture_output=True, text=True, check=False, timeout=300
    )
    assert json.loads(done.stdout)["backend"] == "sagemaker"
    assert "stop sagemaker:" in done.stderr


def test_the_import_has_no_side_effects(aws: dict[str, str]) -> None:
    program = """
import boto3, gc, json, logging, sys
from cloudtrain.backends.sagemaker.sdk_import import load_sdk, start_import

def global_state():
    names = ("", "sagemaker", "sagemaker.config", "botocore", "boto3")
    loggers = [(logging.getLogger(name).handlers, logging.getLogger(name).propagate) for name in names]
    return sys.stdout, sys.excepthook, logging.getLogger().level, loggers, gc.isenabled(), gc.get_freeze_count()

before = global_state()
start_import()
print("printed during the import")
sdk = load_sdk()
assert "sagemaker.pytorch" in sys.modules
assert global_state() == before, (global_state(), before)
"""
    assert run(program) == "printed during the import\n"


def test_only_output_of_the_import_is_dropped(fake_sdk: Callable[..., Path]) -> None:
    folder = fake_sdk(
        inputs="import threads\nprint('greetings')\nthreads.importing.set()\nthreads.printed.wait(60)\n"
        "print('farewell')\nFileSystemInput = TrainingInput = None\n"
    )
    (folder / "threads.py").write_text(
        "import threading\nimporting, printed = threading.Event(), threading.Event()\n"
    )
    program = """
import threads
from cloudtrain.backends.sagemaker.sdk_import import load_sdk, start_import

start_import()
assert threads.importing.wait(60)
print("mine")
threads.printed.set()
load_sdk()
print("mine, too")
"""
    assert run(program, folder) == "mine\nmine, too\n"


def test_a_failed_background_import_is_repeated(fake_sdk: Callable[..., Path]) -> None:
    folder = fake_sdk(
        inputs="import threading\nif threading.current_thread() is not threading.main_thread():\n"
        "    raise ImportError('cannot import name TrainingInput from partially initialized module')\n"
        "FileSystemInput = TrainingInput = None\n"
    )
    program = (
        "from cloudtrain.backends.sagemaker.sdk_import import load_sdk\nprint(load_sdk().PyTorch)"
    )
    assert run(program, folder) == "found\n"


def test_an_sdk_of_another_version_is_reported(
    cli_process: Cli, aws: dict[str, str], fake_sdk: Callable[..., Path]
) -> None:
    folder = fake_sdk(inputs="")
    environ = {"PYTHONPATH": os.pathsep.join([str(folder), os.environ["PYTHONPATH"]])}
    done = cli_process("submit", JOB, "--skip-check", environ=environ)
    assert done.code == 2
    assert "needs sagemaker 2.x" in done.err


def test_only_our_own_settings_skip_a_second_validation(aws: dict[str, str]) -> None:
    program = """
import boto3
from cloudtrain.backends.sagemaker.sdk_import import NO_TELEMETRY, load_sdk, suppress_output
sdk = load_sdk()
import jsonschema, sagemaker.utils
from sagemaker.config.config_schema import TELEMETRY_OPT_OUT_PATH as path

checked = []
check = jsonschema.validate
jsonschema.validate = lambda *arguments: checked.append(arguments[0]) or check(*arguments)
with suppress_output():
    session = sdk.Session(boto_session=boto3.Session(), default_bucket="mine", sagemaker_config=NO_TELEMETRY)
    assert sagemaker.utils.get_sagemaker_config_value(session, path) is True
assert len(checked) == 1 and checked[0] is NO_TELEMETRY
try:
    sagemaker.utils.get_sagemaker_config_value(None, path, {"wrong": 1})
except jsonschema.ValidationError:
    print("refused")
"""
    assert run(program) == "refused\n"


WITHOUT_SDK = """\
import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "sagemaker":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Finder())
sys.argv = ["cloudtrain", *sys.argv[1:]]
from cloudtrain.__main__ import main
main()
"""


def without_sdk(
    *arguments: object, transport: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command where `sagemaker` cannot be imported."""
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_SDK, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, **({"CLOUDTRAIN_TRANSPORT": transport} if transport else {})},
    )


def test_boto3_sends_where_the_sdk_is_missing(cli_process: Cli, aws: dict[str, str]) -> None:
    import boto3

    assert "sent by       boto3, without the SageMaker SDK\n" in without_sdk("plan", JOB).stdout
    planned = json.loads(without_sdk("plan", JOB, "--json").stdout)
    with_sdk = cli_process("plan", JOB, "--json").json
    assert (planned["sender"], with_sdk["sender"]) == ("boto3", "estimator")
    assert (
        planned["request"]["HyperParameters"].keys()
        == with_sdk["request"]["HyperParameters"].keys()
    )
    assert "sagemaker" not in without_sdk("check", JOB).stderr
    done = without_sdk("submit", JOB, "--skip-check", "--json")
    assert done.returncode == 0, done.stderr
    run = json.loads(done.stdout)["run"]
    sent = boto3.client("sagemaker").describe_training_job(TrainingJobName=run)
    assert sent["RoleArn"] == with_sdk["request"]["RoleArn"]
    assert json.loads(without_sdk("plan", JOB, "--local", "--json").stdout)["sender"] is None


def test_a_demanded_sdk_that_is_missing_is_an_error(aws: dict[str, str]) -> None:
    for command_ in ("check", "submit"):
        done = without_sdk(command_, JOB, transport="estimator")
        assert done.returncode == 2
        assert "sending through the SageMaker SDK needs sagemaker 2.x" in done.stderr
        assert "CLOUDTRAIN_TRANSPORT=boto3" in done.stderr
