"""Secrets in local runs, with real launchers and ranks, and with Secrets Manager over HTTP."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.jobs import Cli

pytestmark = [pytest.mark.processes, pytest.mark.aws]

VALUE = "correct-horse/battery+staple"
LINES = "first line of it\nsecond line of it"
JOB = """\
name: secret
code:
  script: train.py
  env:
    PLAIN: "1"
    WANDB_API_KEY: {secret: team/wandb, key: api_key}
    NOTES: {secret: notes}
cluster: {instance_type: ml.m5.large, instances: 2, processes_per_instance: 2}
"""
SCRIPT = """
import json, os, pathlib, subprocess, sys, time

key = os.environ["WANDB_API_KEY"]
place = pathlib.Path(os.environ["SM_MODEL_DIR"])
(place / f"rank-{os.environ['RANK']}.txt").write_text(key + "|" + os.environ["NOTES"])
print("python says", key)
print(json.dumps({"notes": os.environ["NOTES"]}), file=sys.stderr)
subprocess.run(["/bin/sh", "-c", "echo the shell says $WANDB_API_KEY"])
if os.environ.get("RANK") == "0":
    folder = pathlib.Path(os.environ["SM_OUTPUT_DATA_DIR"])
    held = {}
    for process in pathlib.Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                environ = (process / "environ").read_bytes()
                line = (process / "cmdline").read_bytes().replace(b"\\0", b" ").decode()
            except OSError:
                continue
            if os.environ["TRAINING_JOB_NAME"].encode() in environ:
                held[f"{process.name} {line}"] = {
                    "environ": key.encode() in environ, "line": key in line
                }
    (folder / "held.json").write_text(json.dumps(held))
if "FAIL" in os.environ:
    raise ValueError(f"cannot log in with {key}")
"""


@pytest.fixture
def stored(aws: dict[str, str]) -> Any:
    """Two secrets, one of them a JSON object."""
    import boto3

    manager = boto3.client("secretsmanager")
    manager.create_secret(
        Name="team/wandb", SecretString=json.dumps({"api_key": VALUE, "user": "ada"})
    )
    manager.create_secret(Name="notes", SecretString=LINES)
    return manager


Job = Callable[..., Path]


def everything_below(folder: Path) -> dict[str, str]:
    """Return all files of a run as text, except those that the script has written."""
    files = [path for path in folder.rglob("*") if path.is_file() and "rank-" not in path.name]
    return {
        str(path.relative_to(folder)): path.read_bytes().decode("utf-8", "replace")
        for path in files
    }


@pytest.mark.promise
@pytest.mark.usefixtures("stored")
def test_only_ranks_have_the_secrets(cli: Cli, job: Job) -> None:
    done = cli("submit", job(JOB, train_py=SCRIPT), "--local", "--follow", "--json")
    assert done.code == 0, done.err
    run = done.json["run"]
    folder = Path(done.json["artifacts"]["folder"])
    for host, rank in (("algo-1", 0), ("algo-1", 1), ("algo-2", 2), ("algo-2", 3)):
        content = (folder / f"hosts/{host}/opt/ml/model/rank-{rank}.txt").read_text()
        assert content == f"{VALUE}|{LINES}"
    files = everything_below(folder)
    assert len(files) > 10
    assert not [
        name
        for name, text in files.items()
        if VALUE in text or "second line of it" in text or "first line of it" in text
    ]
    log = files["logs/algo-1.log"]
    assert "python says ***" in log
    assert "the shell says ***" in log
    assert '{"notes": "***"}' in log
    shown = cli("logs", run)
    assert VALUE not in done.out + done.err + shown.out
    # The launcher's environment and the command lines do not contain the secrets.
    held = json.loads(files["hosts/algo-1/opt/ml/output/data/held.json"])
    assert not [line for line, found in held.items() if found["line"]]
    launchers = [
        found for line, found in held.items() if "-m cloudtrain_runtime.launch " in f"{line} "
    ]
    assert len(launchers) >= 1
    assert not [found for found in launchers if found["environ"]]
    assert [
        found for line, found in held.items() if "cloudtrain_worker" in line and found["environ"]
    ]


@pytest.mark.usefixtures("stored")
def test_the_reason_of_a_failure_contains_no_secret(cli: Cli, job: Job) -> None:
    done = cli(
        "submit",
        job(JOB, train_py=SCRIPT),
        "--local",
        "--follow",
        "--json",
        "--set",
        "code.env.FAIL=1",
    )
    assert done.code == 4
    assert "ValueError: cannot log in with ***" in done.json["reason"]
    folder = Path(done.json["artifacts"]["folder"])
    assert not [name for name, text in everything_below(folder).items() if VALUE in text]
    explained = cli("explain", done.json["run"])
    assert "cannot log in with ***" in explained.out
    assert VALUE not in done.out + done.err + explained.out


def test_a_variable_of_this_shell_replaces_the_secret(cli: Cli, job: Job) -> None:
    here = {"WANDB_API_KEY": VALUE, "NOTES": LINES, "AWS_ENDPOINT_URL": "http://127.0.0.1:9"}
    one = ("--set", "cluster.instances=1", "--set", "cluster.processes_per_instance=1")
    done = cli(
        "submit", job(JOB, train_py=SCRIPT), "--local", "--follow", "--json", *one, environ=here
    )
    assert done.code == 0, done.err
    folder = Path(done.json["artifacts"]["folder"])
    assert (folder / "hosts/algo-1/opt/ml/model/rank-0.txt").read_text() == f"{VALUE}|{LINES}"
    held = json.loads((folder / "hosts/algo-1/opt/ml/output/data/held.json").read_text())
    assert [
        found
        for line, found in held.items()
        if "cloudtrain_runtime.launch" in line and found["environ"]
    ]
    assert not [line for line, found in held.items() if found["line"]]
    assert not [name for name, text in everything_below(folder).items() if VALUE in text]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "code.env.WANDB_API_KEY={secret: gone}",
            (
                "WANDB_API_KEY: the secret gone is not there in us-west-2: create it, or fix its name in "
                "code.env (Resource"
            ),
        ),
        (
            "code.env.WANDB_API_KEY={secret: team/wandb, key: apikey}",
            "WANDB_API_KEY: the secret team/wandb has no key apikey; it has api_key, user",
        ),
        (
            "code.env.NOTES={secret: notes, key: a}",
            "NOTES: the secret notes is no JSON object, so it has no key a",
        ),
        (
            "code.env.NOTES={secret: notes, stage: AWSPENDING}",
            "NOTES: the secret notes is not there with the stage",
        ),
    ],
)
@pytest.mark.usefixtures("stored")
def test_unavailable_secret_is_an_error_before_the_start(
    cli: Cli, job: Job, override: str, expected: str, tmp_path: Path
) -> None:
    done = cli("submit", job(JOB, train_py=SCRIPT), "--local", "--set", override)
    assert done.code == 2
    assert expected in done.err
    assert "in this shell to run without AWS" in done.err
    assert "Traceback" not in done.err
    assert VALUE not in done.err
    assert not list((tmp_path / "runs-home" / "runs").glob("*"))


def test_missing_credentials_are_reported(
    cli: Cli, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-west-2")
    done = cli("submit", job(JOB, train_py=SCRIPT), "--local")
    assert done.code == 2
    assert "the secret team/wandb cannot be read: there are no credentials" in done.err
