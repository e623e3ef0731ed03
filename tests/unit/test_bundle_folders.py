"""Unusual code folders: links, deep trees, odd names, missing permissions, and several problems at once."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.code_folders import ACCESS_KEY_ID, user_file_names, write_tree

from cloudtrain.bundle import collect, list_contents
from cloudtrain.bundle.archive import write_bundle
from cloudtrain.errors import BundleError


def test_the_folder_of_local_runs_is_always_excluded(tmp_path: Path) -> None:
    folder = write_tree(tmp_path / "a", a_py="", mine__runs__one__request="")
    (folder / "mine" / "runs" / "one" / "train").symlink_to(tmp_path)
    assert [
        e.name for e in collect(folder, home=folder / "mine").entries if "cloudtrain_" not in e.name
    ] == ["a.py"]


def test_links(tmp_path: Path) -> None:
    folder = write_tree(tmp_path / "a", a_py="1")
    (folder / "b.py").symlink_to("a.py")
    assert user_file_names(folder) == ["a.py", "b.py"]
    (folder / "out.py").symlink_to(tmp_path / "elsewhere.py")
    with pytest.raises(BundleError, match="outside of the code folder"):
        collect(folder)


def test_broken_links_are_reported(tmp_path: Path) -> None:
    folder = write_tree(tmp_path / "a", a_py="1", sub__b_py="")
    cases = {"loop": "loop", "gone": "nothing", "inner": "sub", "history": ".git/config"}
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("x")
    expected = {
        "loop": "points to itself",
        "gone": "points to nothing: No such file",
        "inner": "a link to a folder",
        "history": "which is always excluded",
    }
    for name, target in cases.items():
        (folder / name).symlink_to(target)
        with pytest.raises(BundleError, match=f"{name} is .*{expected[name]}"):
            collect(folder)
        (folder / ".cloudtrainignore").write_text(f"{name}\n")
        assert "sub/b.py" in user_file_names(folder)
        (folder / name).unlink()
    (folder / "data").symlink_to(tmp_path)
    with pytest.raises(BundleError, match="outside of the code folder"):
        collect(folder)


@pytest.mark.parametrize("name", ["runs [1]", "sp*ce", ".hidden", "runs"])
def test_the_home_is_excluded_with_any_name_and_behind_links(tmp_path: Path, name: str) -> None:
    folder = write_tree(tmp_path / "a", a_py="")
    (folder / name / "runs").mkdir(parents=True)
    (folder / name / "runs" / "state.json").write_text("x")
    (tmp_path / "link").symlink_to(folder)
    for root in (folder, tmp_path / "link"):
        for home in (folder / name, tmp_path / "link" / name):
            names = [
                entry.name
                for entry in collect(root, home=home).entries
                if "cloudtrain_" not in entry.name
            ]
            assert names == ["a.py"]
    (folder / "shortcut").symlink_to(name)
    assert (
        collect(folder, home=folder / name).exclusion_reason("shortcut/x") == "runs of cloudtrain"
    )


def test_a_home_that_is_the_code_folder(tmp_path: Path) -> None:
    folder = write_tree(tmp_path / "a", a_py="", runs__x="", bundles__y="")
    assert [
        e.name for e in collect(folder, home=folder).entries if "cloudtrain_" not in e.name
    ] == ["a.py"]


@pytest.fixture
def nest(tmp_path: Path) -> Iterator[Callable[[str, int], Path]]:
    """Return a function that creates a tree deeper than Python can create or remove by path."""
    folder = write_tree(tmp_path / "a", a_py="")

    def create(name: str, depth: int) -> Path:
        here = os.open(folder, os.O_RDONLY)
        for _ in range(depth):
            os.mkdir(name, dir_fd=here)
            below = os.open(name, os.O_RDONLY, dir_fd=here)
            os.close(here)
            here = below
        os.close(os.open("deep.py", os.O_CREAT | os.O_WRONLY, dir_fd=here))
        os.close(here)
        return folder

    yield create
    subprocess.run(["rm", "-rf", folder], check=True)


def test_a_very_deep_tree_is_included(tmp_path: Path, nest: Callable[[str, int], Path]) -> None:
    contents = collect(nest("d", 1200))
    assert contents.entries[-1].name == "d/" * 1200 + "deep.py"
    with tarfile.open(write_bundle(contents, tmp_path / "out").path) as archive:
        assert contents.entries[-1].name in archive.getnames()


def test_a_tree_deeper_than_the_path_limit_is_refused(nest: Callable[[str, int], Path]) -> None:
    with pytest.raises(BundleError, match="cannot be read: File name too long"):
        collect(nest("d" * 100, 60))


def test_a_name_that_is_not_utf8_is_refused_in_printable_form(tmp_path: Path) -> None:
    folder = write_tree(tmp_path / "a", a_py="")
    (Path(os.fsdecode(os.fsencode(folder) + b"/caf\xe9.py"))).write_text("")
    with pytest.raises(BundleError, match="is not UTF-8") as caught:
        collect(folder)
    str(caught.value).encode()
    (folder / ".cloudtrainignore").write_text("caf*\n")
    assert user_file_names(folder) == [".cloudtrainignore", "a.py"]
    json.dumps(collect(folder).to_json()).encode()


def test_names_with_newlines_are_included_and_escaped(tmp_path: Path) -> None:
    folder = write_tree(tmp_path / "a", a_py="")
    (folder / "two\nlines").write_text("1")
    assert user_file_names(folder) == ["a.py", "two\nlines"]
    (folder / "two\nlines").rename(folder / "two\nlines.pt")
    assert collect(folder).left_out[0].name == "two\\nlines.pt"


@pytest.fixture
def _unprivileged() -> Iterator[None]:
    """Drop root's permission to read everything, where the tests run as root."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    yield
    os.seteuid(user)


@pytest.mark.parametrize("name", ["sub", "a.py", ".gitignore"])
def test_unreadable_paths_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, name: str
) -> None:
    folder = write_tree(tmp_path / "a", a_py="", sub__b_py="")
    (folder / ".gitignore").write_text("x\n")
    monkeypatch.chdir(folder)  # another user may not enter this folder by its absolute path
    Path(name).chmod(0)
    request.getfixturevalue("_unprivileged")
    with pytest.raises(BundleError, match=f"{name}.* cannot be read: Permission denied"):
        collect(Path())


def test_a_missing_code_folder_is_reported(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="nowhere cannot be read: No such file"):
        collect(tmp_path / "nowhere")


def test_sockets_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_tree(tmp_path / "a", a_py="")
    monkeypatch.chdir(folder)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("s")
        with pytest.raises(BundleError, match="s is neither file nor folder"):
            collect(folder)


def test_setup_py_at_the_root_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"has a setup\.py at its root"):
        collect(write_tree(tmp_path / "a", setup_py=""))


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    folder = write_tree(
        tmp_path / "a",
        setup_py="",
        a_py=f"'{ACCESS_KEY_ID}'",
        cloudtrain_runtime__x_py="",
        sub__b_py="",
    )
    (folder / "gone.txt").symlink_to("nothing")
    (folder / "inner").symlink_to("sub")
    for number in range(12):
        (folder / f"out{number:02}").symlink_to(tmp_path)
    (folder / "sub" / ".gitignore").write_text("[a\n")
    os.mkfifo(folder / "pipe")
    (folder / ".env").write_text("x")
    with pytest.raises(BundleError) as caught:
        list_contents(folder)
    message = caught.value.message
    for part in [
        "18 problems in the code folder:\n",
        "  the code folder has a setup.py at its root",
        "/ of its own\n    rename it\n",
        "  gone.txt is a link that points to nothing: No such file or directory\n",
        "  inner is a link to a folder\n    copy it, or name it in .cloudtrainignore\n",
        "  sub/.gitignore:1: [a is not a valid pattern",
        "  pipe is neither file nor folder\n",
        "\n  and 3 more such\n    replace it by a file, or name it in .cloudtrainignore if the code does not need it; a link",
        "\n2 files look like they hold secrets, which the bundle would include:\n",
        "\n  .env: environment file\n  a.py:1: AWS access key id",
    ]:
        assert part in message
    assert message.count("outside of the code folder") == 9
    assert "the line /.env excludes it" in caught.value.hint
    assert ACCESS_KEY_ID not in str(caught.value)


def test_a_single_problem_is_reported_with_the_secrets(tmp_path: Path) -> None:
    folder = write_tree(tmp_path / "a", setup_py="")
    (folder / ".env").write_text("x")
    with pytest.raises(
        BundleError,
        match=r"(?s)^1 problem in the code folder.*setup\.py.*1 file looks like.*\.env: environment",
    ):
        collect(folder)


def test_reserved_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="of its own"):
        collect(write_tree(tmp_path / "a", cloudtrain_runtime__x_py=""))


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    folder = write_tree(tmp_path / "a", a_py="")
    os.mkfifo(folder / "pipe")
    with pytest.raises(BundleError, match="neither file nor folder"):
        collect(folder)


def test_a_too_large_bundle_lists_its_largest_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cloudtrain.bundle.contents.MAX_BYTES", 200_000)
    folder = write_tree(tmp_path / "a", a_py="", weights="x" * 200_000)
    with pytest.raises(BundleError) as caught:
        collect(folder)
    assert "weights" in caught.value.hint
