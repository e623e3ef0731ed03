"""Files that are there by name only: in code, in local data and as initial weights."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from support.plans import SETTINGS

import cloudtrain
from cloudtrain.bundle import collect
from cloudtrain.bundle import digests as bundle_digests
from cloudtrain.errors import SpecError
from cloudtrain.support import file_pointers
from cloudtrain.support.file_pointers import find_pointers

LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
ANNEX = "/annex/objects/SHA256E-s31390--f50d7ac4.csv\n"
DVC = "outs:\n- md5: a304afb96060aad90176268345e10355\n  size: 37\n  path: labels.csv\n"
HEAD = "cluster: {instance_type: ml.m5.large}\n"
GITMODULES = '[submodule "lib"]\n\tpath = code/lib\n\turl = https://example.com/lib.git\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A job of a script, with a data folder that has content."""
    folder = tmp_path / "job"
    for name in ("code", "data"):
        (folder / name).mkdir(parents=True)
    (folder / "code" / "train.py").write_text("print(1)\n")
    (folder / "code" / "requirements.txt").write_text("einops\n")
    (folder / "data" / "real.csv").write_text("1,2\n")
    return folder


def plan(folder: Path, job: str, *, local: bool) -> cloudtrain.Plan:
    path = folder / "job.yaml"
    path.write_text(f"name: demo\n{HEAD}{job}\n")
    return cloudtrain.plan(path, local=local, settings=SETTINGS)


def warnings(folder: Path, job: str, *, local: bool = True) -> str:
    return "\n".join(plan(folder, job, local=local).warnings)


def errors(folder: Path, job: str, *, local: bool = True) -> str:
    with pytest.raises(SpecError) as caught:
        plan(folder, job, local=local)
    return str(caught.value)


SCRIPT = "code: {directory: code, script: train.py}"
WITH_DATA = f"{SCRIPT}\ndata: {{train: data}}"


@pytest.mark.parametrize("local", [True, False])
def test_a_file_that_the_job_names_has_content(folder: Path, *, local: bool) -> None:
    code = folder / "code"
    for field, name in {
        "script": "train.py",
        "module": "train",
        "task": "train:Mine",
        "command": "[python, train.py]",
    }.items():
        (code / "train.py").write_text(LFS)
        train = "\ntrain: {epochs: 1, batch_size: 1}" if field == "task" else ""
        found = errors(folder, f"code: {{directory: code, {field}: {name!s}}}{train}", local=local)
        assert f"code.{field}: {code}/train.py is a Git LFS pointer; run git lfs pull" in found
        assert len(found.splitlines()) == 1, found
    (code / "train.py").write_text("print(1)\n")
    (code / "requirements.txt").write_text(ANNEX)
    found = errors(folder, f"{SCRIPT[:-1]}, requirements: requirements.txt}}", local=local)
    assert "requirements.txt is a git-annex pointer; run git annex get" in found


@pytest.mark.parametrize("local", [True, False])
def test_other_pointers_in_the_code_are_a_warning(folder: Path, *, local: bool) -> None:
    (folder / "code" / "vocab.json").write_text(LFS)
    (folder / "shared").mkdir()
    (folder / "shared" / "__init__.py").write_text("")
    (folder / "shared" / "table.json").write_text(LFS)
    job = f"{SCRIPT[:-1]}, include: [shared]}}"
    expected = "code: cloudtrain_include/shared/table.json, vocab.json are Git LFS pointers: run git lfs pull"
    assert expected in warnings(folder, job, local=local)
    for name in ("code/vocab.json", "shared/table.json"):
        (folder / name).write_text("{}")
    assert "pointer" not in warnings(folder, job, local=local)


def test_the_cache_of_digests_remembers_pointers(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle_digests, "_MIN_CACHED_FILES", 1)
    monkeypatch.setattr(bundle_digests, "CLOCK_TICK_NS", 0)
    (folder / "code" / "vocab.json").write_text(LFS)
    first = collect(folder / "code", home=tmp_path / "home").pointers
    monkeypatch.setattr(bundle_digests, "read_digest", lambda *_, **__: pytest.fail("read again"))
    assert collect(folder / "code", home=tmp_path / "home").pointers == first
    assert first.message == "vocab.json is a Git LFS pointer"


@pytest.mark.parametrize("local", [True, False])
def test_data_without_content_is_an_error(folder: Path, *, local: bool) -> None:
    data = folder / "data"
    (data / "real.csv").unlink()
    (data / "README.md").write_text("# About\n")
    (data / ".gitattributes").write_text("*.csv filter=lfs\n")
    (data / "part").mkdir()
    for name in ("a.csv", "part/b.csv"):
        (data / name).write_text(LFS)
    found = errors(folder, WITH_DATA, local=local)
    expected = f"data.train: {data} has no content: a.csv, part/b.csv are Git LFS pointers; run git lfs pull"
    assert expected in found
    named = errors(folder, f"{SCRIPT}\ndata: {{train: {{uri: data/a.csv}}}}", local=local)
    assert "a.csv has no content: a.csv is a Git LFS pointer" in named


@pytest.mark.parametrize("local", [True, False])
def test_data_that_lacks_a_part_is_a_warning(folder: Path, *, local: bool) -> None:
    data = folder / "data"
    (data / "a.csv").write_text(LFS)
    (data / "b.csv").write_text(ANNEX)
    (data / "c.csv").symlink_to(".git/annex/objects/XX/c.csv")
    (data / "labels.csv.dvc").write_text(DVC)

    (data / "no-objects.txt").write_text("")  # an image's labels, which may be none
    for name in ("fetched", "sub"):
        (data / name).mkdir()
    (data / "fetched" / "x").write_text("x")
    (folder / ".gitmodules").write_text(
        "[submodule 'a']\n path = data/sub\n[b]\n path=data/fetched\n"
    )
    found = warnings(folder, WITH_DATA, local=local)
    line = next(line for line in found.splitlines() if line.startswith("data.train: "))
    for part in (
        "a.csv is a Git LFS pointer",
        "b.csv is a git-annex pointer",
        "c.csv is a link without a target",
        "labels.csv is known to DVC only",
        "sub/ is a submodule that is not checked out",
        *("run git lfs pull", "run git annex get", "run dvc pull"),
    ):
        assert part in line
    assert "no-objects" not in line
    assert "fetched" not in line


def test_initial_weights_have_content(folder: Path) -> None:
    (folder / "code" / "train.py").write_text(
        "from cloudtrain_runtime import Task\n\n\nclass Mine(Task):\n"
        "    def model(self): ...\n    def datasets(self): ...\n    def loss(self, model, batch): ...\n"
    )
    (folder / "model.pt").write_text(LFS)
    job = "code: {directory: code, task: 'train:Mine'}\ntrain: {epochs: 1, batch_size: 1, init_from: model.pt}"
    assert "train.init_from:" in (found := errors(folder, job))
    assert "model.pt is a Git LFS pointer; run git lfs pull" in found
    (folder / "model.pt").write_bytes(b"PK" + bytes(3000))
    assert "pointer" not in warnings(folder, job)


def test_submodules_that_are_not_checked_out_are_named(folder: Path) -> None:
    """One that .gitmodules lists, as in an archive of a repository, and one in git's index alone."""
    for name in ("lib", "planted", "out"):
        (folder / "code" / name).mkdir()
    (folder / ".gitmodules").write_text(GITMODULES)
    assert "code: lib/ is a submodule that is not checked out" in warnings(folder, SCRIPT)
    git = ["git", "-C", str(folder)]
    link = f"160000,{'1' * 40},code/planted"
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "update-index", "--add", "--cacheinfo", link], check=True)
    expected = "code: lib/, planted/ are submodules that are not checked out: run git submodule update --init"
    assert expected in warnings(folder, SCRIPT)
    (folder / "code" / "lib" / "a.py").write_text("")
    (folder / "code" / ".gitignore").write_text("planted/\n")
    assert "submodule" not in warnings(folder, SCRIPT)


def test_what_is_missing_in_a_submodule_is_explained(folder: Path) -> None:
    (folder / "code" / "lib").mkdir()
    (folder / ".gitmodules").write_text(GITMODULES + "[data]\npath = data\n")
    (folder / "data" / "real.csv").unlink()
    expected = (
        f"{folder}/code/lib is a submodule that is not checked out; run git submodule update --init"
    )
    assert expected in errors(folder, "code: {directory: code, script: lib/train.py}")
    assert expected in errors(folder, "code: {directory: code/lib, script: train.py}")
    found = errors(folder, WITH_DATA)
    assert "there are no files in" in found
    assert "run git submodule update --init" in found


def test_of_many_files_a_sample_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    kind_of = file_pointers.pointer_kind_of
    monkeypatch.setattr(
        file_pointers, "pointer_kind_of", lambda path: (read.append(path), kind_of(path))[1]
    )
    for number in range(600):
        (tmp_path / f"{number:03}.txt").write_text("0 0.5 0.5\n")
        (tmp_path / f"{number:03}.jpg").write_text(LFS if number % 2 else "image")
    found = find_pointers(tmp_path)
    assert found.message.endswith("are Git LFS pointers (in a sample of the files)")
    assert not found.is_all
    assert len(read) <= 40


@pytest.mark.parametrize(
    "content",
    [
        "version https://git-lfs.github.com/spec/v1\n",
        f"# A pointer begins so:\n{LFS}",
        LFS + "x" * 1024,
        "annex/objects",
        "",
    ],
)
def test_what_is_no_pointer_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.csv").write_text(content)
    assert find_pointers(tmp_path).message == ""
