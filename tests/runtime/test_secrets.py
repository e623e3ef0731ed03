"""Secrets in a container: the launcher and a rank fetch them from Secrets Manager over HTTP, and redact them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.aws_frontend import Answer, Front
from support.hosts import SCRIPT_RUN

from cloudtrain_runtime.contract import MlTree, RunConfig, SecretConfig, parse_event
from cloudtrain_runtime.launcher import secrets
from cloudtrain_runtime.launcher.output import RankOutput

pytestmark = pytest.mark.aws

ENTRYPOINTS = Path(secrets.__file__).parent.parent.parent
CONFIG = replace(
    SCRIPT_RUN,
    processes_per_instance=1,
    max_restarts=0,
    secrets={"WANDB_API_KEY": SecretConfig("team/wandb")},
)
ARN = "arn:aws:secretsmanager:eu-west-1:123456789012:secret:team/wandb-AbCdEf"


@pytest.fixture
def manager(aws: dict[str, str]) -> Any:
    import boto3

    return boto3.client("secretsmanager")


@pytest.fixture
def front(aws: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Front]:
    with Front(aws["AWS_ENDPOINT_URL"]).serve() as front:
        monkeypatch.setenv("AWS_ENDPOINT_URL", front.url)
        yield front


def launch(folder: Path, config: RunConfig = CONFIG, **environ: str) -> tuple[int, MlTree, str]:
    tree = MlTree(folder)
    for path in (tree.run_config.parent, tree.code):
        path.mkdir(parents=True)
    tree.run_config.write_text(config.to_json())
    (tree.code / "train.py").write_text("print('started')")
    done = subprocess.run(
        [sys.executable, "-m", "cloudtrain_runtime.launch"],
        env={**os.environ, "CLOUDTRAIN_ML_ROOT": str(folder), **environ},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, tree, done.stdout + done.stderr


ERRORS = [
    (
        "AccessDeniedException",
        "User: arn:aws:sts::123456789012:assumed-role/training/SageMaker is not authorized",
        "role needs secretsmanager:GetSecretValue on arn:aws:secretsmanager:us-west-2:<account>:secret:team/wandb-??",
    ),
    (
        "ResourceNotFoundException",
        "Secrets Manager can't find it",
        "is not there in us-west-2: create it",
    ),
    ("DecryptionFailure", "no key", "cannot be decrypted: the role needs kms:Decrypt"),
    ("UnrecognizedClientException", "bad", "AWS does not accept the credentials"),
]


@pytest.mark.parametrize(("code", "message", "expected"), ERRORS)
def test_an_unreadable_secret_ends_the_host_before_its_ranks(
    tmp_path: Path, front: Front, code: str, message: str, expected: str
) -> None:
    front.respond("GetSecretValue", Answer.json({"__type": code, "message": message}, 400))
    exit_code, tree, printed = launch(tmp_path)
    assert exit_code == 1
    reason = tree.failure.read_text()
    assert reason.startswith("error: WANDB_API_KEY: the secret team/wandb ")
    assert expected in reason
    event = next(event for line in printed.splitlines() if (event := parse_event(line)))
    assert (event["event"], event["message"]) == ("failed", reason.splitlines()[0])
    assert "started" not in printed
    assert "Traceback" not in printed
    assert front.seen.count("GetSecretValue") == 1  # a permanent error is not retried


def test_throttled_requests_are_retried(front: Front, manager: Any) -> None:
    manager.create_secret(Name="team/wandb", SecretString="0a1b2c3d")
    throttled = iter([True, True])
    front.rules["GetSecretValue"] = lambda request: (
        Answer.json({"__type": "ThrottlingException", "message": "slow"}, 400)
        if next(throttled, False)
        else None
    )
    found = secrets.resolve_in_subprocess(CONFIG.secrets)
    assert found == secrets.ResolvedSecrets({"WANDB_API_KEY": "0a1b2c3d"})
    assert front.seen.count("GetSecretValue") == 3


def test_every_variable_without_a_value_is_reported(tmp_path: Path, manager: Any) -> None:
    manager.create_secret(Name="bytes", SecretBinary=b"\0\1")
    manager.create_secret(
        Name="object",
        SecretString=json.dumps({"number": 1.5, "deep": {}, "zero": "a\0b", "half": "\ud83d"}),
    )
    wanted = {
        "A": SecretConfig("bytes"),
        "B": SecretConfig("object", "deep"),
        "C": SecretConfig("object", "zero"),
        "D": SecretConfig("object", "number"),
        "E": SecretConfig("object"),
        "F": SecretConfig("object", "half"),
    }
    found = secrets.resolve_in_subprocess(wanted)
    assert found.values == {
        "D": "1.5",
        "E": '{"number": 1.5, "deep": {}, "zero": "a\\u0000b", "half": "\\ud83d"}',
    }
    assert found.problems == (
        "A: the secret bytes holds bytes, but a variable is text: store it as a string",
        "B: the secret object holds no text under the key deep",
        "C: the secret object holds a zero byte or an invalid character, which a variable cannot hold",
        "F: the secret object holds a zero byte or an invalid character, which a variable cannot hold",
    )
    exit_code, tree, _ = launch(tmp_path, replace(CONFIG, secrets=wanted))
    assert exit_code == 1
    assert len(tree.failure.read_text().splitlines()) == 4


def test_without_a_response_the_network_is_named(
    monkeypatch: pytest.MonkeyPatch, aws: dict[str, str]
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    (problem,) = secrets.resolve_in_subprocess(CONFIG.secrets).problems
    assert (
        "Secrets Manager does not answer in us-west-2: the subnets need an endpoint for it"
        in problem
    )


def test_the_region_comes_from_secret_client_or_job() -> None:
    job = {"TRAINING_JOB_ARN": "arn:aws:sagemaker:us-east-2:123456789012:training-job/x"}
    assert secrets.region_of(ARN, "us-west-2", {}) == "eu-west-1"
    assert secrets.region_of("team/wandb", "us-west-2", job) == "us-west-2"
    assert secrets.region_of("team/wandb", None, {**job, "AWS_REGION": "us-west-1"}) == "us-west-1"
    assert secrets.region_of("team/wandb", None, job) == "us-east-2"
    assert (
        secrets.region_of("team/wandb", None, {"TRAINING_JOB_ARN": "arn:aws:sagemaker:local:0:x/y"})
        is None
    )


def test_an_image_without_boto3_is_an_error_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "boto3.py").write_text("raise ImportError('not here')")
    monkeypatch.chdir(tmp_path)
    (problem,) = secrets.resolve_in_subprocess(CONFIG.secrets).problems
    assert (
        problem
        == "WANDB_API_KEY: this image has no boto3, which secrets need: add it to code.requirements"
    )


def run_rank(folder: Path, script: str) -> tuple[int, MlTree, str]:
    """Run a rank as AWS's toolkit does: without a launcher that has fetched the secrets."""
    tree = MlTree(folder)
    for path in (tree.run_config.parent, tree.code, tree.output_data):
        path.mkdir(parents=True)
    tree.run_config.write_text(CONFIG.to_json())
    (tree.code / "train.py").write_text(script)
    own = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
    }
    done = subprocess.run(
        [sys.executable, "-u", "-m", "cloudtrain_runtime.worker"],
        cwd=tree.code,
        env={**os.environ, **own, "MASTER_PORT": "1", "CLOUDTRAIN_ML_ROOT": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, tree, done.stdout + done.stderr


def test_a_rank_without_our_launcher_fetches_secrets(tmp_path: Path, manager: Any) -> None:
    manager.create_secret(Name="team/wandb", SecretString="correct-horse")
    script = "import os; key = os.environ['WANDB_API_KEY']; print(len(key)); raise ValueError(f'no login by {key}')"
    exit_code, tree, printed = run_rank(tmp_path, script)
    assert exit_code == 1
    assert "13\n" in printed
    assert "ValueError: no login by ***" in printed
    assert "ValueError: no login by ***" in tree.failure.read_text()
    assert "correct-horse" not in printed


@pytest.mark.usefixtures("aws")
def test_a_rank_without_its_secret_fails_without_traceback(tmp_path: Path) -> None:
    exit_code, tree, printed = run_rank(tmp_path, "print('started')")
    assert exit_code == 1
    assert (
        "[rank0]: error: WANDB_API_KEY: the secret team/wandb is not there in us-west-2" in printed
    )
    assert tree.failure.read_text().startswith(
        "rank 0 failed: WANDB_API_KEY: the secret team/wandb is not there"
    )
    assert "started" not in printed
    assert "Traceback" not in printed


def test_output_is_forwarded_immediately_and_redacted() -> None:
    source, target = os.pipe()
    output = RankOutput(["secret-value"], target=target)
    writer = os.dup(output.descriptor)
    output.close_write_end()
    os.write(writer, b"step 1\n")
    assert os.read(source, 100) == b"step 1\n"
    os.write(writer, b"a secret-")
    assert os.read(source, 100) == b"a "
    os.write(writer, b"value and \xff\n" + b"x" * 10_000)
    os.close(writer)
    output.end()
    os.close(target)
    rest = b""
    while piece := os.read(source, 1 << 16):
        rest += piece
    assert rest == b"*** and \xff\n" + b"x" * 10_000
    os.close(source)


def test_output_ends_while_a_child_process_still_runs() -> None:
    source, target = os.pipe()
    output = RankOutput(["secret-value"], target=target)
    os.write(output.descriptor, b"last line")
    output.end()  # returns although the descriptor is still open
    assert os.read(source, 100) == b"last line"
    for descriptor in (source, target, output.descriptor):
        os.close(descriptor)
