"""Files that programs write outside of the kept folders are found, and each run finds its own."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from cloudtrain_runtime.contract import MlTree, parse_event
from cloudtrain_runtime.launcher import unkept_files
from cloudtrain_runtime.launcher.code_outputs import CodeFolder
from cloudtrain_runtime.launcher.unkept_files import (
    Budget,
    Surroundings,
    is_left_out,
    new_files,
    places_of_instance,
    recorded_files,
    scan,
)

ENTRYPOINTS = Path(__file__).parents[2] / "entrypoints"
PROGRAM = """
import sys
sys.path.insert(0, ENTRYPOINTS)
from cloudtrain_runtime.launcher.written_files import start

start(sys.argv[1])

import os, pathlib, shutil, sqlite3, subprocess
import torch
from safetensors.torch import save_file

base, name = pathlib.Path(sys.argv[2]), sys.argv[3]
os.makedirs(base, exist_ok=True)
(base / f"{name}-path").write_text("x")
os.close(os.open(f"{base}/{name}-descriptor", os.O_CREAT | os.O_WRONLY))
torch.save({}, f"{base}/{name}-torch")
save_file({"w": torch.zeros(1)}, f"{base}/{name}-safetensors")
sqlite3.connect(f"{base}/{name}-sqlite").execute("create table x (y)")
own = f"{name}-own"
pathlib.Path(own).write_text("x")
subprocess.run(["cp", own, f"{base}/{name}-cp"], check=True)
subprocess.run(["cp", own, str(base)], check=True)
subprocess.run(["dd", "if=/dev/zero", f"of={base}/{name}-dd", "bs=1", "count=3"], check=True, stderr=-3)
os.system(f"echo x > {base}/{name}-shell")
os.rename(own, base / f"{name}-moved")
shutil.copytree(base, base / f"{name}-tree", ignore=lambda _, names: set(names) - {f"{name}-path"})
if os.fork() == 0:
    (base / f"{name}-forked").write_text("x")
    os._exit(0)
os.wait()
(base / "__pycache__").mkdir(exist_ok=True)
(base / "__pycache__" / f"{name}-cache").write_text("x")
(base / f"{name}-gone").write_text("x")
(base / f"{name}-gone").unlink()
open(base / "old").read()
"""
NAMES = (
    *("path", "descriptor", "torch", "safetensors", "sqlite", "cp", "own", "dd", "shell", "moved"),
    *("tree/{}-path", "forked"),
)


@pytest.mark.processes
def test_each_run_finds_what_it_has_written(tmp_path: Path) -> None:
    base = tmp_path / "shared"
    base.mkdir()
    (base / "old").write_text("x")
    began = time.time() + 0.1
    time.sleep(0.2)
    program = PROGRAM.replace("ENTRYPOINTS", repr(str(ENTRYPOINTS)))
    runs = {}
    for name in ("a", "b"):
        folder = tmp_path / name
        folder.mkdir()
        command = [sys.executable, "-c", program, str(tmp_path / f"{name}-records")]
        runs[name] = subprocess.Popen([*command, str(base), name], cwd=folder)
    assert [run.wait() for run in runs.values()] == [0, 0]
    records = {name: str(tmp_path / f"{name}-records") for name in runs}
    for name, other in (("a", "b"), ("b", "a")):
        around = Surroundings(str(tmp_path / "ml"), [str(tmp_path / name)], [records[other]])
        found = recorded_files(records[name], began, around, Budget())
        names = {path.removeprefix(f"{base}/") for files in found.values() for path in files}
        assert names == {f"{name}-{each.format(name)}" for each in NAMES}


def test_a_new_folder_is_named_once(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    records = tmp_path / "records"
    records.write_bytes(f"folder {folder}\0file {folder}/a\0folder {folder}/deep\0".encode())
    (folder / "deep").mkdir(parents=True)
    (folder / "a").write_text("xx")
    (folder / "deep" / "b").write_text("xxx")
    found = recorded_files(str(records), 0.0, Surroundings("/opt/ml", []), Budget())
    assert {name: sum(files.values()) for name, files in found.items()} == {f"{folder}/": 5}


def test_an_instance_finds_all_new_files(tmp_path: Path) -> None:
    (tmp_path / ".cache" / "old").mkdir(parents=True)
    (tmp_path / ".cache" / "old" / "file").write_text("x")
    time.sleep(0.2)
    began = time.time()
    for name in (".cache/new/a", ".cache/new/b", ".cache/pip/c", "out/d", "e", "kept/f"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    around = Surroundings("/opt/ml", [str(tmp_path / "kept")])
    found = new_files([str(tmp_path)], began, around, Budget())
    shown = {name.removeprefix(f"{tmp_path}/"): len(files) for name, files in found.items()}
    assert shown == {".cache/new/": 2, "out/": 1, "e": 1}


def test_the_places_of_an_instance_hold_no_system_folder() -> None:
    places = places_of_instance()
    assert str(Path.home()) in places or any(
        str(Path.home()).startswith(f"{each}/") for each in places
    )
    assert not {"/usr", "/etc", "/proc", "/dev", "/run"} & set(places)
    assert not [one for one in places for other in places if one.startswith(f"{other}/")]


def test_a_scan_ends_with_its_budget(tmp_path: Path) -> None:
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(20):
        (folder / str(number)).touch()
    few, late = Budget(entries=15), Budget(seconds=-1.0)
    assert len(scan(str(folder), few)) == 15
    assert scan(str(folder), late) == {}
    assert not few.is_complete
    assert not late.is_complete


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/scratch/out/model.pt", False),
        ("/home/me/.cache/nanochat/base.pt", False),
        ("/home/me/.cache/huggingface/hub/x", True),
        ("/home/me/.triton/cache/x", True),
        ("/scratch/tmpabc12345/x", True),
        ("/scratch/torchelastic_x/y", True),
        ("/proc/1/x", True),
        ("/ml/model/x", True),
        ("/ml/model2/x", False),
    ],
)
def test_caches_and_temporary_files_are_left_out(path: str, expected: bool) -> None:
    assert is_left_out(path, ["/ml/model"]) is expected


@pytest.mark.parametrize(
    ("path", "is_found"),
    [
        ("/opt/results/a.pt", True),
        ("/opt/a.pt", True),
        ("/var/results/a.pt", True),
        ("/var/tmp/a.pt", True),  # noqa: S108 (nothing is written)
        ("/opt/conda/lib/x.py", False),
        ("/var/log/syslog", False),
        ("/var/lib/dpkg/status", False),
    ],
)
def test_opt_and_var_hold_results_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, path: str, is_found: bool
) -> None:
    (tmp_path / path.lstrip("/")).parent.mkdir(parents=True)
    (tmp_path / path.lstrip("/")).write_text("x")
    monkeypatch.setattr(
        unkept_files,
        "SYSTEM_BELOW",
        {f"{tmp_path}{each}" for each in unkept_files.SYSTEM_BELOW},
    )
    places = [f"{tmp_path}/{path.split('/')[1]}"]
    found = new_files(places, 0.0, Surroundings("/opt/ml", []), Budget())
    assert [name for files in found.values() for name in files] == [f"{tmp_path}{path}"] * is_found


@pytest.mark.parametrize(
    "path",
    [
        "/root/.cache/vllm/x",
        "/home/me/.local/share/wandb/artifacts/x",
        "/home/me/nltk_data/corpora/x",
        "/root/.keras/datasets/mnist.npz",
        "/tmp/ray/session_latest/x",  # noqa: S108 (nothing is written)
    ],
)
def test_caches_are_no_results(path: str) -> None:
    assert is_left_out(path, [])
    assert not is_left_out(f"/data{path.replace('/.', '/')}-1".replace("nltk_data/", "data/"), [])


def test_a_kept_folder_counts_by_its_real_path_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    real = tmp_path / "elsewhere"
    tree = MlTree(tmp_path / "runs/run/hosts/algo-1/opt/ml")
    real.mkdir()
    tree.root.mkdir(parents=True)
    tree.checkpoints.symlink_to(real)
    (tmp_path / "outside").mkdir()
    monkeypatch.setenv("CLOUDTRAIN_ML_ROOT", str(tree.root))
    code = CodeFolder(tree, [])
    tree.written.parent.mkdir(parents=True)
    for path in (real / "a.pt", tmp_path / "outside" / "b.pt"):
        path.write_text("x")
    entries = [f"file {real}/a.pt", f"file {tmp_path}/outside/b.pt", f"folder {real}"]
    tree.written.write_text("".join(f"{each}\0" for each in entries))
    code.report("algo-1")
    (event,) = filter(None, map(parse_event, capfd.readouterr().out.splitlines()))
    assert [each["path"] for each in event["unkept"]] == [f"{tmp_path}/outside/b.pt"]


def test_a_folder_of_checkpoints_of_several_hosts_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    tree = MlTree(tmp_path / "runs/run/hosts/algo-1/opt/ml")
    shared = tmp_path / "runs/run/my checkpoints"
    for folder in (tree.checkpoints, shared, tree.start):
        folder.mkdir(parents=True)
    monkeypatch.setenv("CLOUDTRAIN_ML_ROOT", str(tree.root))
    code = CodeFolder(tree, [], shared.as_uri())
    (shared / "step-00000020").mkdir()
    (shared / "step-00000020" / "manifest.json").write_text("{}")
    tree.written.write_text(f"folder {shared}/step-00000020\0")
    code.report("algo-1")
    (event,) = filter(None, map(parse_event, capfd.readouterr().out.splitlines()))
    assert event["unkept"] == []


def test_many_records_take_one_scan_of_each_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file in a new folder that is recorded, too, was once scanned for each of its records."""
    (tmp_path / "new").mkdir()
    names = [f"{tmp_path}/new/{number}" for number in range(300)]
    for name in names:
        Path(name).touch()
    records = tmp_path / "records"
    records.write_text(
        "".join(f"{entry}\0" for entry in [f"folder {tmp_path}/new", *(f"file {n}" for n in names)])
    )
    checks = list[str]()
    plain = unkept_files.is_left_out
    monkeypatch.setattr(
        unkept_files, "is_left_out", lambda path, kept: checks.append(path) or plain(path, kept)
    )
    found = recorded_files(str(records), 0.0, Surroundings("/opt/ml", []), Budget())
    assert sum(map(len, found.values())) == 300
    assert len(checks) <= 2 * len(names)
