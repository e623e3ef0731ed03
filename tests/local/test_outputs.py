"""Files that a script writes to its code folder are kept if `code.outputs` lists them, and reported otherwise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from support.jobs import Cli, Finished

pytestmark = pytest.mark.processes

JOB = """\
name: keeps
code: {script: train.py, outputs: OUTPUTS}
cluster: {instance_type: ml.g5.xlarge, instances: 1, processes_per_instance: 1}
"""
SCRIPT = """\
import os
from pathlib import Path

steps = Path("snapshot.txt")
print("begins with", steps.read_text() if steps.exists() else "nothing")
Path("aside").write_text("5 steps")
os.replace("aside", "snapshot.txt")
os.makedirs("out/deep", exist_ok=True)
Path("out/deep/weights.bin").write_bytes(bytes(3_000_000))
os.makedirs("logs", exist_ok=True)
Path("logs/a.txt").write_text("a" * 2000)
Path("logs/b.txt").write_text("b" * 1000)
"""


def _reported(cli: Cli, done: Finished) -> list[str]:
    """Return the warnings of the hosts about files."""
    warnings: list[str] = cli("status", done.json["run"], "--json").json["warnings"]
    return [text for text in warnings if text.startswith(("algo-", "the model folder"))]


def test_files_that_are_not_kept_are_reported(cli: Cli, job: Callable[..., Path]) -> None:
    path = job(
        JOB.replace("OUTPUTS", "[]"), train_py=SCRIPT, helper_py="", notes="shipped with the code"
    )
    done = cli("submit", path, "--local", "--follow", "--json")
    assert done.code == 0, done.err
    lost, model = _reported(cli, done)
    assert lost.startswith(
        "algo-1: 4 files (3.0 MB) are not kept: "
        "out/ (3.0 MB), logs/ (2 files, 3.0 KB), snapshot.txt (7 B). "
    )
    assert lost.endswith("with code: {outputs: [out/, logs/, snapshot.txt]}")
    assert model.startswith("the model folder is empty")
    assert lost in done.err
    shown = cli("status", done.json["run"]).out
    assert "out/ (3.0 MB)" in shown.replace("\n", " ")
    assert "the model folder is empty" in shown


def test_outputs_are_kept_and_a_resumed_run_finds_them(cli: Cli, job: Callable[..., Path]) -> None:
    path = job(JOB.replace("OUTPUTS", "[out/, snapshot.txt]"), train_py=SCRIPT)
    path.with_name("snapshot.txt").write_text("the shipped one")
    first = cli("submit", path, "--local", "--follow", "--json")
    assert first.code == 0, first.err
    assert "begins with the shipped one" in first.err
    kept = Path(urlsplit(first.json["artifacts"]["outputs"]).path)
    assert (kept / "snapshot.txt").read_text() == "5 steps"
    assert (kept / "out/deep/weights.bin").stat().st_size == 3_000_000
    assert _reported(cli, first)[0].startswith("algo-1: 2 files (3.0 KB) are not kept: logs/")
    second = cli("resume", first.json["run"], "--follow", "--json")
    assert second.code == 0, second.err
    assert "begins with 5 steps" in second.err


def test_a_failed_run_reports_its_files(cli: Cli, job: Callable[..., Path]) -> None:
    path = job(
        JOB.replace("OUTPUTS", "[out/, never.pt]"),
        train_py=SCRIPT + "\nraise ValueError('at the end')",
    )
    done = cli("submit", path, "--local", "--follow", "--json")
    assert done.code == 4, done.err
    assert [text.partition(":")[0] for text in _reported(cli, done)] == ["algo-1"]
    assert (
        Path(done.json["artifacts"]["folder"]) / "checkpoints/outputs/out/deep/weights.bin"
    ).is_file()
    warnings = cli("status", done.json["run"], "--json").json["warnings"]
    assert any(text.startswith("code.outputs: no host wrote never.pt") for text in warnings)
