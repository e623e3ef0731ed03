"""`cloudtrain doctor`: each check has a row, and only what local runs need can fail."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import boto3
import pytest
from support.jobs import Cli, Finished

from cloudtrain.support.installation import install_command

psutil, torch = (pytest.importorskip(name) for name in ("psutil", "torch"))

ROWS = [
    *("Python", "cloudtrain", "torch", "GPUs", "NCCL", "psutil", "/opt/ml", "disk", "port"),
    *("credentials", "region", "role", "bucket", "SageMaker SDK", "boto3"),
]
WATCH = """
import os, sys

def watch(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto", "socket.sendmsg"):
        file = os.open({file!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.write(file, f"{{event}} {{arguments}}\\n".encode())
        os.close(file)

sys.addaudithook(watch)
"""


def rows_of(done: Finished) -> dict[str, dict[str, Any]]:
    return {check["name"]: check for check in done.json["checks"]}


def run_without(module: str, *arguments: str, cwd: Path | None = None, **environ: str) -> Finished:
    """Run the command in an interpreter that cannot import a module."""
    program = (
        f"import sys; sys.modules[{module!r}] = None; from cloudtrain.cli import run; "
        "sys.exit(run(['doctor', *sys.argv[1:]]))"
    )
    words = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, cwd=cwd, env={**os.environ, **environ}
    )
    return Finished(done.returncode, done.stdout, done.stderr)


def test_a_machine_for_local_runs_passes(cli: Cli, tmp_path: Path) -> None:
    done = cli("doctor")
    assert done.code == 0, done.out + done.err
    lines = [line for line in done.out.splitlines() if not line.lstrip().startswith("fix: ")]
    assert [line[6 : 6 + len(name)] for line, name in zip(lines, ROWS, strict=False)] == ROWS
    assert lines[len(ROWS) :] == ["local runs are possible"]
    assert torch.__version__ in done.out
    assert f"free for local runs in {tmp_path / 'runs-home'}" in done.out


def test_json_has_the_same_rows_without_an_account(cli: Cli) -> None:
    done = cli("doctor", "--json")
    assert (done.code, done.json["ok"]) == (0, True)
    found = rows_of(done)
    assert list(found) == ROWS
    assert all(set(check) == {"name", "result", "detail", "fix"} for check in found.values())
    assert {check["result"] for check in found.values()} <= {"pass", "note"}
    assert found["boto3"]["detail"] == boto3.__version__
    assert found["psutil"]["detail"] == psutil.__version__
    assert [found[name]["result"] for name in ("credentials", "region", "role", "bucket")] == [
        "note"
    ] * 4
    assert found["role"]["fix"] == "for SageMaker: cloudtrain configure"


def test_a_missing_psutil_fails_with_the_command() -> None:
    done = run_without("psutil")
    assert done.code == 2
    assert "fail  psutil         not installed\n" in done.out
    assert f"fix: {install_command('local')}\n" in done.out
    assert done.out.endswith("local runs are not possible: see the failed checks\n")


def test_a_missing_torch_fails() -> None:
    done = run_without("torch", "--json")
    assert done.code == 2
    assert rows_of(done)["torch"]["detail"] == "not installed"


def test_a_broken_torch_fails_with_its_reason(cli_process: Cli, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(
        "raise ImportError('libcudnn.so.9: cannot open shared object file')\n"
    )
    done = cli_process("doctor", "--json", environ={"PYTHONPATH": str(tmp_path)})
    assert done.code == 2
    assert "libcudnn.so.9: cannot open shared object file" in rows_of(done)["torch"]["detail"]


def test_gpus_that_torch_cannot_use_fail(cli: Cli) -> None:
    """A plan would count these GPUs, which do not exist."""
    done = cli("doctor", "--json", environ={"CUDA_VISIBLE_DEVICES": "97,98"})
    assert done.code == 2
    assert rows_of(done)["GPUs"]["detail"].startswith("2, but torch ")


def test_settings_are_shown_with_their_source() -> None:
    file = Path(os.environ["HOME"], ".config", "cloudtrain", "config.toml")
    file.parent.mkdir(parents=True)
    file.write_text("# mine\nbucket = 'my-bucket'\n")
    Path(os.environ["AWS_CONFIG_FILE"]).write_text("[profile team]\nsso_session = team\n")
    found = rows_of(
        run_without("torch", "--json", CLOUDTRAIN_REGION="us-west-2", AWS_PROFILE="team")
    )
    assert found["bucket"]["detail"] == f"my-bucket, from {file}:2"
    assert found["region"]["detail"] == "us-west-2, from CLOUDTRAIN_REGION"
    assert found["credentials"]["detail"] == "AWS SSO, from profile team of AWS"
    unknown = rows_of(run_without("torch", "--json", AWS_PROFILE="nobody"))["credentials"]
    assert (unknown["result"], "nobody" in unknown["detail"]) == ("note", True)


def test_settings_beside_a_job_need_agreement(tmp_path: Path) -> None:
    (tmp_path / "cloudtrain.toml").write_text("bucket = 'mine'\n")
    found = rows_of(run_without("torch", "--json", cwd=tmp_path))["bucket"]
    assert (found["result"], "--trust" in found["fix"]) == ("note", True)


def test_a_malformed_settings_file_fails(tmp_path: Path) -> None:
    (tmp_path / "cloudtrain.toml").write_text("bukket = 'mine'\n")
    found = rows_of(run_without("torch", "--json", cwd=tmp_path))["bucket"]
    assert (found["result"], found["fix"]) == ("fail", 'did you mean "bucket"?')


def test_a_home_that_cannot_be_made_fails(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = rows_of(
        run_without("torch", "--json", CLOUDTRAIN_HOME=str(tmp_path / "file" / "home"))
    )["disk"]
    assert (found["result"], "CLOUDTRAIN_HOME" in found["fix"]) == ("fail", True)


def test_no_other_host_is_asked(cli_process: Cli, tmp_path: Path) -> None:
    """Neither the metadata of an EC2 instance nor the program of a profile is used."""
    seen, started = tmp_path / "seen", tmp_path / "started"
    (tmp_path / "sitecustomize.py").write_text(WATCH.format(file=str(seen)))
    Path(os.environ["AWS_CONFIG_FILE"]).write_text(
        f"[profile team]\ncredential_process = touch {started}\n"
    )
    environ = {"PYTHONPATH": str(tmp_path), "AWS_EC2_METADATA_DISABLED": "false"}
    assert cli_process("doctor", environ=environ).code == 0
    assert cli_process("doctor", environ={**environ, "AWS_PROFILE": "team"}).code == 0
    assert not started.exists()
    assert not seen.exists(), seen.read_text()
    code = "import socket; socket.getaddrinfo('127.0.0.1', 80)"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, **environ}, check=True)
    assert "socket.getaddrinfo" in seen.read_text()
