"""A job may delete and rewrite its channels, as on an instance, and the user's data stays as it is."""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.jobs import Cli

from cloudtrain.backends.container import mount_namespace
from cloudtrain.backends.container.channel_copies import add_copy, end_copies
from cloudtrain_runtime.contract import MlTree

needs_namespaces = pytest.mark.skipif(
    not mount_namespace.is_available(), reason="this machine allows no mount namespace"
)
JOB = r"""
name: copies
code: {script: train.py}
cluster: {instance_type: ml.m5.large, instances: 2, processes_per_instance: 1}
data:
  train: "my data, a:b\\c"
  labels: labels.csv
limits: {runtime: 10m}
"""
SCRIPT = """
import os, shutil
from pathlib import Path

host = os.environ["SM_CURRENT_HOST"]
train = Path(os.environ["SM_CHANNEL_TRAIN"])
labels = Path(os.environ["SM_CHANNEL_LABELS"])
print(host, "sees", sorted(each.name for each in train.iterdir()), flush=True)
(train / "shards.tar").unlink()
(train / "labels.csv").write_text("cleaned")
(train / "cache").mkdir()
shutil.rmtree(train / "nested")
(labels / "labels.csv").write_text("cleaned")
print(host, "leaves", sorted(each.name for each in train.iterdir()), flush=True)
"""


def contents(folder: Path) -> dict[str, str]:
    files = (each for each in sorted(folder.rglob("*")) if each.is_file())
    return {str(each.relative_to(folder)): each.read_text() for each in files}


@needs_namespaces
@pytest.mark.processes
def test_each_instance_changes_its_own_copy(cli: Cli, job: Callable[..., Path]) -> None:
    path = job(JOB, train_py=SCRIPT)
    data = path.parent / r"my data, a:b\c"
    (data / "nested").mkdir(parents=True)
    for name in ("shards.tar", "labels.csv", "nested/x"):
        (data / name).write_text(f"the user's {name}")
    (path.parent / "labels.csv").write_text("the user's labels")
    before = contents(path.parent)
    done = cli("submit", path, "--local", "--follow", "--json")
    assert done.code == 0, done.err
    log = cli("logs", done.json["run"], "--raw").out
    for host in ("algo-1", "algo-2"):
        assert f"{host} sees ['labels.csv', 'nested', 'shards.tar']" in log
        assert f"{host} leaves ['cache', 'labels.csv']" in log
    assert contents(path.parent) == before
    # What the job has changed ends with the instance, and the run's folder leads to the data.
    tree = MlTree(Path(done.json["artifacts"]["folder"]) / "hosts" / "algo-1" / "opt" / "ml")
    assert (tree.data / "train" / "shards.tar").read_text() == "the user's shards.tar"
    assert not list(tree.root.parents[1].glob("copies/*/upper"))


def test_without_a_namespace_the_plan_warns(
    cli: Cli, job: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = job(JOB, train_py=SCRIPT)
    (path.parent / r"my data, a:b\c").mkdir()
    for name in (r"my data, a:b\c/x", "labels.csv"):
        (path.parent / name).touch()
    assert "the job reads your own files" not in cli("plan", path, "--local").err
    monkeypatch.setenv(mount_namespace.SWITCH_VARIABLE, "off")
    planned = cli("plan", path, "--local", environ={mount_namespace.SWITCH_VARIABLE: "off"})
    assert "data.train, data.labels: the job reads your own files" in planned.err


@contextlib.contextmanager
def mounted(folder: Path) -> Iterator[None]:
    """Mount an empty file system on a folder."""
    mount = ["mount", "-t", "tmpfs", "none", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("only root may mount a file system")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def read_and_write(tree: MlTree, place: Path) -> list[str]:
    """Print the files of a copy in its namespace, then try to write one; return the output's lines."""
    program = (
        "import os, sys\nfrom pathlib import Path\nplace = Path(sys.argv[1])\n"
        "print(sorted(str(each.relative_to(place)) for each in place.rglob('*')))\n"
        "try:\n    (place / 'new').write_text('x')\n    print('written')\n"
        "except OSError as error:\n    print(error.strerror)\n"
    )
    command = [sys.executable, "-I", "-S", "-c", program, str(place)]
    done = subprocess.run(
        mount_namespace.wrap(str(tree.root), command), capture_output=True, text=True, check=True
    )
    return [*done.stdout.splitlines(), *done.stderr.splitlines()]


@pytest.fixture
def tree(tmp_path: Path) -> MlTree:
    root = tmp_path / "run" / "hosts" / "algo-1" / "opt" / "ml"
    root.mkdir(parents=True)
    return MlTree(root)


@needs_namespaces
def test_where_no_overlay_is_possible_the_data_is_read_only(tree: MlTree, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "x").touch()
    place = add_copy(tree, "train", data)
    with mounted(place.with_name("work")):  # an overlay needs both layers in one file system
        assert read_and_write(tree, place) == ["['x']", "Read-only file system"]
    assert contents(data) == {"x": ""}


@needs_namespaces
def test_data_with_mounts_below_is_complete_and_warned_of(tree: MlTree, tmp_path: Path) -> None:
    data = tmp_path / "data"
    (data / "disk").mkdir(parents=True)
    with mounted(data / "disk"):
        (data / "disk" / "y").touch()
        place = add_copy(tree, "train", data)
        found, result, warning = read_and_write(tree, place)
        assert (found, result) == ("['disk', 'disk/y']", "written")
        assert f"this machine cannot protect {data}" in warning


@needs_namespaces
def test_the_end_deletes_what_was_changed(tree: MlTree, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    place = add_copy(tree, "train", data)
    assert read_and_write(tree, place) == ["[]", "written"]
    assert (place.with_name("upper") / "new").exists()
    end_copies(tree)
    assert not place.with_name("upper").exists()
    assert place.resolve() == data
    assert contents(data) == {}


END_AS_NOBODY = """
import os, sys
from pathlib import Path
from cloudtrain.backends.container.channel_copies import end_copies
from cloudtrain_runtime.contract import MlTree

if os.geteuid() == 0:
    os.setuid(65534)
tree = MlTree(Path(sys.argv[1]))
folder = Path(sys.argv[2])
for path in (folder / "upper" / "mine", folder / "work" / "work"):
    path.mkdir(parents=True)
    (path / "file").touch()
    path.chmod(0)
(folder / "upper" / "link").symlink_to(sys.argv[3])
end_copies(tree)
print(sorted(os.listdir(folder)))
"""


def test_folders_that_their_owner_may_not_read_are_deleted(tmp_path: Path) -> None:
    # As the kernel makes them for an overlay. Root reads every folder.
    with tempfile.TemporaryDirectory() as temporary:
        top = Path(temporary)
        top.chmod(0o777)
        other = top / "other"
        other.mkdir(mode=0o500)
        root = top / "opt" / "ml"
        copies = Path(mount_namespace.copies_of(str(root))) / "train"
        for each in (root, copies):
            each.mkdir(parents=True)
            each.chmod(0o777)
        done = subprocess.run(
            [sys.executable, "-c", END_AS_NOBODY, str(root), str(copies), str(other)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.stdout == "[]\n", done.stderr
        assert other.stat().st_mode & 0o777 == 0o500
