"""Manifests as untrusted input: invalid content gives an error message, and no path leaves its folder."""

from __future__ import annotations

import json
import math
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.jobs import Cli
from torch import nn

from cloudtrain_runtime.checkpoint.inspection import Inspection
from cloudtrain_runtime.checkpoint.manager import CheckpointManager
from cloudtrain_runtime.contract import CheckpointConfig
from cloudtrain_runtime.contract.manifest import Manifest
from cloudtrain_runtime.errors import CheckpointError, DamagedError
from cloudtrain_runtime.process.run_context import Context

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.distributed.checkpoint warns

NAME = "step-00000007"
DEEP: Any = []
for _ in range(400):
    DEEP = [DEEP]

# Each field with invalid values. `DELETE` removes the field.
DELETE = object()
INVALID: dict[str, list[Any]] = {
    "run": [
        "../../../tmp/evil",
        "/etc/passwd",
        "a/b",
        "..",
        "a\nb",
        "\x1b[2Jx",
        "é",
        "x" * 64,
        "-a",
        5,
        None,
        [],
        {},
    ],
    "attempt": ["", "ABCDEF01", "0a1b2c3", 7, None, "../../x1"],
    "step": ["7", 7.5, -1, 8, 2**60, None, True, math.nan, [7]],
    "time": ["now", None, math.nan, math.inf, -1, 10**12, True],
    "world_size": [0, -1, "1", 1.5, None, 10**9],
    "mesh": [None, [], {"data": "1"}, {"data": 0}, {"\x1b[2J": 1}, 3],
    "rng": [None, "x", []],
    "torch": [None, 2.13, "x" * 300, "2.13\x1b[0m"],
    "code": [None, 1],
    "request": [None, {"a": 1}],
    "state": [None, [], "x", 1],
    "block_bytes": [0, -1, "4096", None, 2**40, 1.5, 1],
    "training": ["x", [], 1, None],
    "version": [1, 3, "2", None, True, [2]],
    "files": [
        *(
            None,
            [],
            "x",
            {"../../evil": {"bytes": 0, "crc32": []}},
            {"a/b": {"bytes": 0, "crc32": []}},
        ),
        *(
            {"..": {"bytes": 0, "crc32": []}},
            {"x": None},
            {"x": {"bytes": 5}},
            {"x": {"crc32": []}},
        ),
        *({"x": {"bytes": -1, "crc32": []}}, {"x": {"bytes": "5", "crc32": ["00000000"]}}),
        *({"x": {"bytes": 5, "crc32": []}}, {"x": {"bytes": 5, "crc32": ["zzzzzzzz"]}}),
        *({"x": {"bytes": 5, "crc32": "00000000"}}, {"x": {"bytes": 5, "crc32": [1]}}, {}),
    ],
    **{name: [DELETE] for name in ("crc32", "missing")},
}
CASES = [(field, value) for field, values in INVALID.items() for value in values]
CASES += [
    (field, DELETE)
    for field in INVALID
    if field not in ("crc32", "missing", "training", "block_bytes")
]
TEXTS = [
    b"",
    b"x",
    b"null",
    b"[]",
    b"5",
    b'"x"',
    b"{",
    b"\xff\xfe",
    b"{}",
    b"[" * 100_000,
    b'{"version": 1e999}',
    b"NaN",
]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a checkpoint that this version has saved."""
    from dataclasses import replace

    from support.checkpoint_folders import process_group

    from cloudtrain_runtime.process.run_context import read_context

    root = tmp_path_factory.mktemp("original")
    context = replace(read_context({}), run="demo")
    model, optimizer = pair()
    with process_group(context):
        assert checkpoints_at(root, context).save(
            7, model, [optimizer], {"epoch": 1}, {}, wait=True
        )
    return root / NAME


def pair() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def checkpoints_at(root: Path, context: Context) -> CheckpointManager:
    return CheckpointManager(CheckpointConfig(root.as_uri(), None, None, 3, "auto"), context)


def with_checksum(content: Mapping[str, Any]) -> bytes:
    """Return a manifest with its correct checksum, which an attacker can compute, too."""
    crc = zlib.crc32(json.dumps(content, sort_keys=True).encode())
    return json.dumps({**content, "crc32": f"{crc:08x}"}).encode()


def crafted(original: Path, field: str, value: Any) -> bytes:
    """Return the original's manifest with another value of one field."""
    content = json.loads((original / "manifest.json").read_bytes())
    if field == "crc32":
        content.pop("crc32")
        return json.dumps(content).encode()
    if field == "missing":
        return b"{}"
    content.pop("crc32")
    if value is DELETE:
        content.pop(field)
    else:
        content[field] = value
    return with_checksum(content)


def read_everywhere(root: Path, context: Context, text: bytes, original: Path) -> tuple[str, str]:
    """Read a manifest through every function that reads manifests; return the listed state and its reason."""
    shutil.copytree(original, root / NAME)
    (root / NAME / "manifest.json").write_bytes(text)
    found = Inspection(str(root))
    (entry,) = found.entries
    messages = []
    for use in (
        lambda: found.verify(lambda event: None),
        lambda: found.export(
            found.find(), root.parent / "out" / "x.pt", form="torch", part="model"
        ),
        lambda: resume(root, context),
        lambda: checkpoints_at(root, context).peek_state(),
        lambda: checkpoints_at(root, context).load_weights(7, pair()[0]),
    ):
        try:
            use()
        except (CheckpointError, DamagedError) as error:
            messages.append(str(error))
    assert not any("\x1b" in message for message in messages)
    assert str(entry.run or "") == "" or entry.run == "demo"
    return entry.state, entry.why


def resume(root: Path, context: Context) -> None:
    model, optimizer = pair()
    checkpoints_at(root, context).resume(model, [optimizer])


def test_there_are_enough_crafted_manifests() -> None:
    assert len(CASES) + len(TEXTS) >= 71


@pytest.mark.parametrize(
    ("field", "value"), CASES, ids=lambda value: "deleted" if value is DELETE else ascii(value)[:40]
)
def test_invalid_fields_make_a_checkpoint_damaged(
    original: Path, context: Context, tmp_path: Path, field: str, value: Any
) -> None:
    root = tmp_path / "checkpoints"
    state, why = read_everywhere(root, context, crafted(original, field, value), original)
    if (field, value) == ("files", {}):
        return  # complete: the manifest lists no files, which only a load can detect
    is_newer = (field, value) == ("version", 3)
    assert state == ("unreadable" if is_newer else "damaged")
    assert "manifest.json" in why or "missing" in why
    assert "\x1b" not in why


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: repr(text[:20]))
def test_unparseable_manifests_make_a_checkpoint_damaged(
    original: Path, context: Context, tmp_path: Path, text: bytes
) -> None:
    state, why = read_everywhere(tmp_path / "checkpoints", context, text, original)
    assert (state, "manifest.json" in why) == ("damaged", True)


@pytest.mark.parametrize(
    "state",
    [
        {"best": 0.25},
        {"best": {"marks": 5}},
        {"best": {"marks": [1, None, {"step": "x"}, {"place": ""}, {"step": 70}]}},
        {"best": {"marks": {"step": 7}}},
        {"data": [], "patience": 1},
    ],
    ids=repr,
)
def test_a_scripts_state_may_hold_any_json(
    original: Path, context: Context, tmp_path: Path, state: Any
) -> None:
    root = tmp_path / "checkpoints"
    assert (
        read_everywhere(root, context, crafted(original, "state", state), original)[0] == "complete"
    )
    checkpoints = checkpoints_at(root, context)
    model, optimizer = pair()
    assert checkpoints.resume(model, [optimizer]).state == state
    for step in (8, 9, 10, 11):  # retention also reads the states
        assert checkpoints.save(step, model, [optimizer], state, {}, wait=True)
    assert len(Inspection(str(root)).entries) == 3


def test_fields_of_later_versions_are_ignored(original: Path) -> None:
    content = json.loads(crafted(original, "training", {"entry": "a:B"}))
    content.pop("crc32")
    manifest = Manifest.from_json(with_checksum({**content, "later": {"x": 1}}))
    assert manifest.training == {"entry": "a:B"}


def test_a_deeply_nested_state_raises_checkpoint_errors(
    original: Path, context: Context, tmp_path: Path
) -> None:
    read_everywhere(
        tmp_path / "checkpoints", context, crafted(original, "state", {"x": DEEP}), original
    )


def test_an_export_stays_in_its_folder(original: Path, cli: Cli, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    shutil.copytree(original, root / NAME)
    (root / NAME / "manifest.json").write_bytes(crafted(original, "run", "../../evil"))
    (root / NAME / "writer.json").write_text(json.dumps({"run": "../../evil"}))
    here = tmp_path / "a" / "b"
    here.mkdir(parents=True)
    done = cli("checkpoints", "export", str(root), "--to", "torch", cwd=here)
    assert done.code == 2
    assert "Traceback" not in done.err
    assert not list(tmp_path.rglob("*evil*"))
    assert "evil" not in cli("checkpoints", str(root), "--json").json["checkpoints"][0]["name"]


def test_a_task_rejects_a_state_that_no_task_saved(
    original: Path, tmp_path: Path, cli: Cli
) -> None:
    golden = Path(__file__).parent.parent / "golden_checkpoints"
    shutil.copytree(golden / "torch-2.15", tmp_path / "checkpoints")
    for name in ("small.py", "job.yaml"):
        shutil.copy(golden / name, tmp_path)
    (folder,) = (tmp_path / "checkpoints").iterdir()
    state = json.loads((folder / "manifest.json").read_bytes())["state"]
    (folder / "manifest.json").write_bytes(
        crafted(folder, "state", {**state, "patience": {"other": 1}})
    )
    done = cli("submit", tmp_path / "job.yaml", "--local", "--follow", "--json")
    assert done.code == 4
    assert "manifest.json is not what a Task saves" in done.json["reason"]


def test_a_stray_file_is_ignored(original: Path, context: Context, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    shutil.copytree(original, root / NAME)
    for name in ("step-00099999", "step-00000008"):
        (root / name).write_text("a note")
    checkpoints = checkpoints_at(root, context)
    model, optimizer = pair()
    assert checkpoints.resume(model, [optimizer]).step == 7
    assert checkpoints.save(8, model, [optimizer], {}, {}, wait=True)
    assert [entry.step for entry in Inspection(str(root)).entries] == [8, 7]
    assert (root / "step-00099999").read_text() == "a note"
