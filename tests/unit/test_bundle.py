import os
import tarfile
from pathlib import Path

import pytest

from cloudtrain.bundle import collect, write_bundle
from cloudtrain.errors import BundleError


def tree(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        path = folder / name.replace("__", "/").replace("_py", ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return folder


def own_names(folder: Path) -> list[str]:
    return [entry.name for entry in collect(folder).entries if not entry.name.startswith("cloudtrain_")]


def test_equal_code_gives_equal_bytes_anywhere_and_any_day(tmp_path: Path) -> None:
    first = tree(tmp_path / "a", b_py="2", a_py="1", sub__c_py="3")
    second = tree(tmp_path / "b", sub__c_py="3", a_py="1", b_py="2")
    for path in second.rglob("*"):
        os.utime(path, (1, 1))
    (second / "a.py").chmod(0o600)
    one, two = (write_bundle(collect(folder), tmp_path / f"out-{folder.name}") for folder in (first, second))
    assert one.info == two.info
    assert one.path.read_bytes() == two.path.read_bytes()


def test_what_changes_the_digest(tmp_path: Path) -> None:
    folder = tree(tmp_path / "a", a_py="1")
    digests = {collect(folder).info.digest}
    (folder / "a.py").write_text("2")
    digests.add(collect(folder).info.digest)
    (folder / "a.py").chmod(0o755)
    digests.add(collect(folder).info.digest)
    (folder / "a.py").rename(folder / "b.py")
    digests.add(collect(folder).info.digest)
    assert len(digests) == 4


def test_the_archive_starts_one_rank_and_holds_the_runtime(tmp_path: Path) -> None:
    bundle = write_bundle(collect(tree(tmp_path / "a", a_py="1")), tmp_path / "out")
    with tarfile.open(bundle.path) as archive:
        names = archive.getnames()
        member = archive.getmember("a.py")
    assert "cloudtrain_worker.py" in names
    assert "cloudtrain_runtime/contract.py" in names
    assert (member.mtime, member.uid, member.uname, member.mode) == (0, 0, "", 0o644)


def test_it_is_written_once(tmp_path: Path) -> None:
    contents = collect(tree(tmp_path / "a", a_py="1"))
    first = write_bundle(contents, tmp_path / "out").path
    before = first.stat().st_mtime_ns
    assert write_bundle(contents, tmp_path / "out").path == first
    assert first.stat().st_mtime_ns == before


def test_ignore_files_count_with_nesting_and_negation(tmp_path: Path) -> None:
    folder = tree(tmp_path / "a", keep_py="", logs__a="", sub__x_txt="", sub__y_txt="", data__big="", top_txt="")
    (folder / ".gitignore").write_text("logs/\n*_txt\n/data\n")
    (folder / "sub" / ".gitignore").write_text("!y_txt\n")
    (folder / ".cloudtrainignore").write_text("!/data\n")
    assert own_names(folder) == [
        ".cloudtrainignore",
        ".gitignore",
        "data/big",
        "keep.py",
        "sub/.gitignore",
        "sub/y_txt",
    ]


def test_history_environments_caches_and_secrets_stay_behind(tmp_path: Path) -> None:
    folder = tree(tmp_path / "a", a_py="")
    for name in (".git", ".venv", "__pycache__", ".cloudtrain", ".aws"):
        (folder / name).mkdir()
        (folder / name / "file").write_text("x")
    for name in (".env", "key.pem", "a.pyc"):
        (folder / name).write_text("x")
    assert own_names(folder) == ["a.py"]
    reasons = dict(collect(folder).left_out)
    assert reasons[".env"] == "looks like a secret"
    assert reasons[".git/"] == "version control"


def test_the_folder_of_local_runs_stays_behind_wherever_it_is(tmp_path: Path) -> None:
    folder = tree(tmp_path / "a", a_py="", mine__runs__one__request="")
    (folder / "mine" / "runs" / "one" / "train").symlink_to(tmp_path)
    assert [e.name for e in collect(folder, home=folder / "mine").entries if "cloudtrain_" not in e.name] == ["a.py"]


def test_links(tmp_path: Path) -> None:
    folder = tree(tmp_path / "a", a_py="1")
    (folder / "b.py").symlink_to("a.py")
    assert own_names(folder) == ["a.py", "b.py"]
    (folder / "out.py").symlink_to(tmp_path / "elsewhere.py")
    with pytest.raises(BundleError, match="outside of the code folder"):
        collect(folder)


def test_setup_py_at_the_root_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"setup\.py lies at the root"):
        collect(tree(tmp_path / "a", setup_py=""))


def test_names_that_cloudtrain_needs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="of its own"):
        collect(tree(tmp_path / "a", cloudtrain_runtime__x_py=""))


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    folder = tree(tmp_path / "a", a_py="")
    os.mkfifo(folder / "pipe")
    with pytest.raises(BundleError, match="neither file nor folder"):
        collect(folder)


def test_too_much_names_the_largest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloudtrain.bundle.MAX_BYTES", 200_000)
    folder = tree(tmp_path / "a", a_py="", weights="x" * 200_000)
    with pytest.raises(BundleError) as caught:
        collect(folder)
    assert "weights" in caught.value.hint
