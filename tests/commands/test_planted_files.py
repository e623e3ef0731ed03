"""A pipe, a device or a folder in place of a file of a run neither stops a command nor takes all memory."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cloudtrain.support.regular_files import MOST_BYTES, read_regular
from cloudtrain_runtime.contract.manifest import checkpoint_folder_name

FILES = (
    *("state.json", "plan.json", "request.json", "events.jsonl", "events-summary.json"),
    *("supervisor.lock", "supervisor.log", "logs/algo-1.log", "config/run.json", "interpreter"),
    *(
        "hosts/algo-1/opt/ml/output/failure",
        f"checkpoints/{checkpoint_folder_name(3)}/manifest.json",
    ),
)
PLANTED: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
}
PROGRAM = """
import sys
import cloudtrain
from cloudtrain.errors import CloudtrainError

for status in cloudtrain.list_runs():
    print(status.run, status.state)
for name in sys.argv[1:]:
    run = cloudtrain.get_run(name)
    for call in (
        run.status,
        run.plan_document,
        run.facts,
        run.history,
        lambda: list(run.logs()),
        lambda: cloudtrain.explain(run),
        lambda: run.download(f"{name}-results"),
        lambda: cloudtrain.resume(run),
    ):
        try:
            call()
        except CloudtrainError as error:
            assert str(error)
print("ended")
"""
_MEMORY_BYTES = 4 << 30


@pytest.mark.parametrize("kind", PLANTED)
def test_commands_end_whatever_is_planted(tmp_path: Path, kind: str) -> None:
    runs = tmp_path / "home" / "runs"
    names = [f"x-261126-1015{number:02d}-1a2b3c" for number in range(len(FILES))]
    for name, file in zip(names, FILES, strict=True):
        (runs / name).mkdir(parents=True)
        (runs / name / "state.json").write_text(json.dumps({"state": "FAILED"}))
        (runs / name / "supervisor.lock").touch()
        path = runs / name / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        PLANTED[kind](path)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *names],
        env={**os.environ, "CLOUDTRAIN_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=600,  # for a hang
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES)),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *listed, last = done.stdout.splitlines()
    assert last == "ended"
    assert {line.split()[0] for line in listed} == set(names)


def test_only_regular_files_of_some_length_are_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"four")
    assert read_regular(path, 4) == b"four"
    with pytest.raises(OSError, match="more than 3 bytes"):
        read_regular(path, 3)
    with path.open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    with pytest.raises(OSError, match="more than"):
        read_regular(path)
    (tmp_path / "link").symlink_to("file")
    path.write_bytes(b"x")
    assert read_regular(tmp_path / "link") == b"x"
