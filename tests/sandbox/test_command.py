"""The command `sandbox`: its output, its errors, concurrent starts and stopping."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.jobs import Cli, command, until

from cloudtrain.backends.sandbox.process import find_sandbox, start_sandbox

pytestmark = pytest.mark.processes


def test_the_first_line_has_the_clients_environment(own_sandbox: Any, cli: Cli) -> None:
    with own_sandbox() as served:
        assert set(served.info) >= {"endpoint", "role", "bucket", "environment"}
        assert set(served.environment) == {
            *(
                "AWS_ENDPOINT_URL",
                "AWS_ACCESS_KEY_ID",
                "AWS_SECRET_ACCESS_KEY",
                "AWS_DEFAULT_REGION",
            ),
            *(
                "AWS_EC2_METADATA_DISABLED",
                "CLOUDTRAIN_ROLE",
                "CLOUDTRAIN_BUCKET",
                "CLOUDTRAIN_REGION",
            ),
        }
        assert served.client("sts").get_caller_identity()["Account"] == "123456789012"
        # With these variables, every command uses the sandbox.
        served.create("digits-261120-101500-1a2b3c", "true")
        served.end_of("digits-261120-101500-1a2b3c")
        listed = cli("list", "--sagemaker", "--json", environ=served.environment).json["runs"]
        assert [(run["run"], run["state"]) for run in listed] == [
            ("digits-261120-101500-1a2b3c", "SUCCEEDED")
        ]
        # Containers have the sandbox's credentials, and not those of the user.
        served.create("keys", "echo $AWS_ACCESS_KEY_ID $AWS_PROFILE $AWS_REGION")
        served.end_of("keys")
        assert served.lines("keys") == [f"{served.environment['AWS_ACCESS_KEY_ID']} us-west-2"]


@pytest.mark.parametrize(
    ("arguments", "plan", "message"),
    [
        (("--faults", "w.yaml"), "capacity_after: 3", 'did you mean "capacity_after_seconds"'),
        (("--faults", "w.yaml"), None, "No such file"),
        (("--port", "PORT"), None, "cannot use port"),
        (("--home", "file"), None, "as a sandbox's folder"),
    ],
)
def test_mistakes_are_reported_in_one_sentence(
    arguments: tuple[str, ...], plan: str | None, message: str, cli: Cli, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    if plan is not None:
        (tmp_path / "w.yaml").write_text(plan)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        words = [word.replace("PORT", str(taken.getsockname()[1])) for word in arguments]
        done = cli("sandbox", *words, cwd=tmp_path)
    assert done.code == 2, done.err
    assert message in done.err
    assert "Traceback" not in done.err


def test_two_concurrent_starts_share_one_sandbox(tmp_path: Path, cli: Cli) -> None:
    home = tmp_path / "runs-home" / "sandbox"
    program = (
        "from cloudtrain.backends.sandbox.process import start_sandbox; from pathlib import Path; "
        f"print(start_sandbox(Path({str(home)!r})).process)"
    )
    both = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=300)[0].strip() for process in both]
    found = find_sandbox(home)
    assert found is not None
    assert outputs == [str(found.process)] * 2
    refused = cli("sandbox")
    assert (refused.code, "a sandbox is already running" in refused.err) == (2, True)
    assert cli("sandbox", "--stop").code == 0
    with contextlib.suppress(
        psutil.NoSuchProcess
    ):  # the process is gone, or its exit code was not read yet
        assert psutil.Process(found.process).status() == psutil.STATUS_ZOMBIE
    assert find_sandbox(home) is None
    assert cli("sandbox", "--stop", "--json").json == {"stopped": False}


def test_the_next_sandbox_is_not_taken_for_a_killed_one(tmp_path: Path, cli: Cli) -> None:
    home = tmp_path / "runs-home" / "sandbox"
    killed = start_sandbox(home)
    os.kill(killed.process, signal.SIGKILL)
    until(lambda: find_sandbox(home) is None)
    assert cli("sandbox", "--stop", "--json").json == {"stopped": False}
    started = start_sandbox(home)
    assert started.process != killed.process
    buckets = started.session().client("s3").list_buckets()["Buckets"]
    assert [bucket["Name"] for bucket in buckets] == [started.bucket]
    assert cli("sandbox", "--stop").code == 0


def test_proxies_and_profiles_have_no_part_in_a_sandbox(
    tmp_path: Path, cli_process: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing listens at the proxy, the profile does not exist, and AWS's file would lead elsewhere."""
    for name in ("http_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "config").write_text("[default]\nuse_fips_endpoint = true\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "missing")
    job = tmp_path / "job"
    job.mkdir()
    (job / "train.py").write_text(
        "import boto3\nprint([b['Name'] for b in boto3.client('s3').list_buckets()['Buckets']])\n"
    )
    (job / "job.yaml").write_text(
        "name: here\ncode: {script: train.py}\ncluster: {instance_type: ml.m5.large}\n"
    )
    try:
        done = cli_process("submit", job / "job.yaml", "--sandbox", "--follow")
        assert done.code == 0, done.err
        assert "['cloudtrain-sandbox']" in done.out
        assert "sandbox:here-" in cli_process("list").out
        started = find_sandbox(tmp_path / "runs-home" / "sandbox")
        assert started is not None
        # Exported, they keep any other client's key from the proxy.
        assert started.environment["NO_PROXY"] == "127.0.0.1,localhost"
    finally:
        assert cli_process("sandbox", "--stop").code == 0


def test_ctrl_c_stops_the_sandbox(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [str(command()), "sandbox", "--home", str(tmp_path / "one")],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ,
    )
    assert process.stdout is not None
    info = json.loads(process.stdout.readline())
    process.send_signal(signal.SIGINT)
    assert process.wait(300) == 0
    process.stdout.close()
    port = int(info["endpoint"].rpartition(":")[2])
    with socket.socket() as probe:
        until(lambda: probe.connect_ex(("127.0.0.1", port)) != 0)
