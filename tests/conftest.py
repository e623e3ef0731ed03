"""Fixtures of all tests. Tests reach no network except loopback, and neither the user's home nor credentials."""

from __future__ import annotations

import gc
import json
import os
import runpy
import shutil
import signal
import subprocess
import tempfile
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from support.aws_calls import RECORD, unknown_calls
from support.aws_models import share_models
from support.command_server import CommandServer, serve_commands
from support.iam_roles import PERMISSIONS, TRUST
from support.jobs import (
    Cli,
    Finished,
    command,
    serve_moto,
)
from support.kernels import kernel_socket
from support.plans import CODE, NOW, SETTINGS, TASK_JOB, WriteJob
from support.sizes import tries
from support.slurm_fixtures import _accounting, _cluster, accounting, slurm, slurm_site  # noqa: F401 (fixtures)
from support.strict_skips import pytest_make_collect_report, pytest_runtest_makereport  # noqa: F401 (hooks)
from support.surroundings import OF_PYTHON, OF_THE_TERMINAL

from cloudtrain.backends.sagemaker.target import SageMakerTarget
from cloudtrain.catalog import bundled_prices
from cloudtrain.job.spec import JobSpec
from cloudtrain.planning.plan import Plan
from cloudtrain.planning.planner import make_plan
from cloudtrain.planning.targets import Target
from cloudtrain.settings.settings import Settings

# On a shared machine a pause can be longer than any deadline for an example.
settings.register_profile("cloudtrain", settings.default, deadline=None, max_examples=tries(100))
settings.load_profile("cloudtrain")

GUARD = Path(__file__).parent / "guard"

collect_ignore = ["gpu"]  # they have a configuration of their own: `make test-gpu`

os.environ["CLOUDTRAIN_TEST_GUARD"] = "1"
os.environ["PYTHONPATH"] = str(GUARD)
# Local runs start with a clean environment. These variables are passed to all their processes.
os.environ["CLOUDTRAIN_PASS_ENVIRONMENT"] = (
    "PYTHONPATH,CLOUDTRAIN_TEST_GUARD,CLOUDTRAIN_TEST_RECORD,ATEN_CPU_CAPABILITY,TORCHINDUCTOR_CACHE_DIR"
)
if "CLOUDTRAIN_TEST_COSTS" in os.environ:
    os.environ["CLOUDTRAIN_PASS_ENVIRONMENT"] += ",CLOUDTRAIN_TEST_COSTS,PYTEST_CURRENT_TEST"
if capability := os.environ.get("ATEN_CPU_CAPABILITY"):
    # The key of torch.compile's cache of graphs (torch 2.13) does not contain the vector width that the code was
    # generated for. Code for 16 floats, compiled for 8, computes half of each vector and leaves the rest uninitialised.
    cache = f"cloudtrain-tests-inductor-{os.getuid()}-{capability}"
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(tempfile.gettempdir(), cache))
# More tests run at a time than most machines have cores. There the threads of one sum wait for each other, and a test
# of four seconds takes minutes. Local runs do not get this variable: they divide the cores by their ranks.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
os.environ["TERM"] = "dumb"
of_tests = (
    *(
        "CLOUDTRAIN_TEST_GUARD",
        "CLOUDTRAIN_TEST_RECORD",
        "CLOUDTRAIN_TEST_STRICT",
        "CLOUDTRAIN_TEST_COSTS",
        "CLOUDTRAIN_TEST_SIZE",
        "CLOUDTRAIN_TEST_SEEDS",
        "CLOUDTRAIN_PASS_ENVIRONMENT",
    ),
    *(
        "CLOUDTRAIN_TF_PLUGINS",
        "CLOUDTRAIN_CHECKOV",
        "CLOUDTRAIN_IAM_SIMULATE",
        "CLOUDTRAIN_AUDIT",
        "CLOUDTRAIN_MATRIX",
    ),
)
# Folder of the log of AWS calls. Workers of pytest-xdist write to the folder of the main process.
keeps_calls = "CLOUDTRAIN_TEST_RECORD" in os.environ
if not keeps_calls:
    os.environ["CLOUDTRAIN_TEST_RECORD"] = tempfile.mkdtemp(prefix="cloudtrain-calls-")
for name in list(os.environ):
    is_account = name.startswith("AWS_") and name != "AWS_EC2_METADATA_DISABLED"
    is_setting = name.startswith("CLOUDTRAIN_") and name not in of_tests
    # CI and a terminal say the same to every test: a test that needs one of these sets it.
    if is_account or is_setting or name in (*OF_THE_TERMINAL, *OF_PYTHON):
        del os.environ[name]
runpy.run_path(str(GUARD / "sitecustomize.py"))
share_models()
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts background jobs with SIGINT ignored, and child processes inherit that. Tests send SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options for other Pythons, which lack what most commands need."""
    parser.addoption(
        "--without-commands", action="store_true", help="leave out the tests that run commands"
    )
    parser.addoption("--share", default="1/1", help="run a share of the tests, such as 2/3")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that run commands, and take a share of the others, if asked for."""
    if config.getoption("--without-commands"):
        items[:] = [item for item in items if not {"cli", "cli_process"} & _fixtures_of(item)]
    number, count = map(int, config.getoption("--share").split("/"))
    items[:] = items[number - 1 :: count]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Keep the garbage collector from scanning again and again what the tests import: that takes a third of the time."""
    gc.disable()
    result = yield
    gc.collect()
    gc.freeze()
    gc.enable()
    return result


def _fixtures_of(item: pytest.Item) -> set[str]:
    return set(item.fixturenames) if isinstance(item, pytest.Function) else set()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a session with AWS calls that are missing in the record. Only pytest's main process checks it."""
    if hasattr(session.config, "workerinput") or keeps_calls:
        return
    folder = Path(os.environ["CLOUDTRAIN_TEST_RECORD"])
    unknown = unknown_calls(folder)
    if not unknown:
        shutil.rmtree(folder)
        return
    session.exitstatus = pytest.ExitCode.TESTS_FAILED
    print(
        f"\n\nCalls to AWS that are missing in {RECORD.name}, so that no test checks the policies for them:"
    )
    print(*(f"  {call}" for call in unknown), sep="\n")
    print(f"Add them: PYTHONPATH=tests python -m support.aws_calls --add {folder}")
    print("Then see tests/infra/test_permissions.py")


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test its own home folder and folder for runs."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(home / "aws-config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(home / "aws-credentials"))
    monkeypatch.setenv("CLOUDTRAIN_HOME", str(tmp_path / "runs-home"))


@pytest.fixture
def socket_path() -> Iterator[Path]:
    """A path for the sockets of a Jupyter kernel."""
    with kernel_socket() as path:
        yield path


@pytest.fixture(scope="session")
def _command_server() -> Iterator[CommandServer]:
    with serve_commands() as server:
        yield server


@pytest.fixture
def cli(_command_server: CommandServer) -> Cli:
    """Run a command in a process that is forked from a server: as `cli_process`, in a tenth of the time."""
    return _command_server.run


@pytest.fixture
def cli_process() -> Cli:
    """Run the installed `cloudtrain` in an interpreter of its own, as a user does."""

    def run(
        *arguments: str | Path, environ: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> Finished:
        done = subprocess.run(
            [str(command()), *map(str, arguments)],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, **(environ or {})},
            cwd=cwd,
            timeout=300,
        )
        return Finished(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., Path]:
    """Write a job folder with a job.yaml and other files; return the path of the job.yaml."""

    def write(text: str, **files: str) -> Path:
        folder = tmp_path / "job"
        folder.mkdir(exist_ok=True)
        for name, content in files.items():
            (folder / name.replace("_py", ".py")).write_text(content)
        path = folder / "job.yaml"
        path.write_text(text)
        return path

    return write


@pytest.fixture
def plan_of(job: WriteJob) -> Callable[..., Plan]:
    """Return a function that plans a job with overrides, for SageMaker with these settings or for another target."""

    def plan(
        *overrides: str,
        text: str = TASK_JOB,
        settings: Settings = SETTINGS,
        target: Target | None = None,
        **arguments: Any,
    ) -> Plan:
        path = job(
            text, mine_py="class Mine(Task):\n    def __init__(self, layers=2): ...\n", train_py=""
        )
        spec = JobSpec.from_yaml(path, overrides)
        target = target or SageMakerTarget(settings, bundled_prices())
        return make_plan(spec, CODE, target, now=NOW, suffix="1a2b3c", **arguments)

    return plan


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start a moto server on loopback; return its address."""
    pytest.importorskip("moto")  # whose packages do not go with torch 2.5
    with serve_moto(tmp_path_factory.mktemp("moto") / "moto.log") as endpoint:
        yield endpoint


@pytest.fixture
def aws(moto: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Create an empty account with a bucket and a role; return the environment variables of a client."""
    urllib.request.urlopen(urllib.request.Request(f"{moto}/moto-api/reset", method="POST")).close()  # noqa: S310
    environment = {
        "AWS_ENDPOINT_URL": moto,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-west-2",
        "CLOUDTRAIN_ROLE": "arn:aws:iam::123456789012:role/training",
        "CLOUDTRAIN_BUCKET": "cloudtrain-test",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    import boto3

    boto3.client("s3").create_bucket(
        Bucket="cloudtrain-test", CreateBucketConfiguration={"LocationConstraint": "us-west-2"}
    )
    iam = boto3.client("iam")
    iam.create_role(RoleName="training", AssumeRolePolicyDocument=json.dumps(TRUST))
    iam.put_role_policy(
        RoleName="training", PolicyName="job", PolicyDocument=json.dumps(PERMISSIONS)
    )
    return environment
