import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from cloudtrain.bundle.git_source import MAX_DIFF_BYTES, read_source
from cloudtrain.planning.plan import CodeInfo, GitSource

Git = Callable[..., str]


@pytest.fixture
def git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Git:
    """Return a function that runs git in a new repository, without the user's configuration."""
    folder = tmp_path / "repository"
    folder.mkdir()
    for name in ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM"):
        monkeypatch.setenv(name, "/dev/null")
    for role in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{role}_NAME", "Somebody")
        monkeypatch.setenv(f"GIT_{role}_EMAIL", "somebody@example.org")

    def run(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", folder, *arguments], check=True, capture_output=True, text=True
        ).stdout

    run("init", "-q", "-b", "main")
    return run


@pytest.fixture
def folder(tmp_path: Path, git: Git) -> Path:
    """Return a repository with one commit of two folders."""
    root = tmp_path / "repository"
    for name in ("job/train.py", "other/x.py"):
        (root / name).parent.mkdir()
        (root / name).write_text("one\n")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    return root


def test_a_clean_checkout(folder: Path, git: Git) -> None:
    commit = git("rev-parse", "HEAD").strip()
    for place in (folder, folder / "job"):
        assert read_source(place) == GitSource(commit, "main", dirty=False, diff="")


def test_changes_count_below_the_code_folder_only(folder: Path) -> None:
    (folder / "other" / "x.py").write_text("two\n")
    source = read_source(folder / "job")
    assert source is not None
    assert (source.dirty, source.diff) == (False, "")
    (folder / "job" / "train.py").write_text("two\n")
    source = read_source(folder / "job")
    assert source is not None
    assert source.dirty
    assert "-one\n+two\n" in source.diff
    assert "other" not in source.diff


def test_the_diff_holds_what_is_staged(folder: Path, git: Git) -> None:
    (folder / "job" / "new.py").write_text("new\n")
    source = read_source(folder / "job")
    assert source is not None
    assert (source.dirty, source.diff) == (True, "")
    git("add", ".")
    source = read_source(folder / "job")
    assert source is not None
    assert "+new\n" in source.diff


@pytest.mark.parametrize(
    "name", ["with space.py", "st*r.py", "tab\tline\n.py", "größe.py", ":(top)x.py"]
)
def test_the_diff_holds_files_with_any_name_and_renamed_ones(
    folder: Path, git: Git, name: str
) -> None:
    (folder / "job" / "train.py").write_text("".join(f"{number}\n" for number in range(50)))
    git("add", ".")
    git("commit", "-q", "-m", "second")
    (folder / "job" / "train.py").rename(folder / "job" / name)
    git("add", ".")
    (folder / "job" / name).write_text("".join(f"{number}\n" for number in range(51)))
    source = read_source(folder / "job")
    assert source is not None
    assert "rename from job/train.py" in source.diff
    assert source.diff.endswith("+50\n")


def test_many_changes_are_all_in_the_diff(folder: Path, git: Git) -> None:
    for number in range(300):
        (folder / "job" / f"{number}.py").write_text(f"new {number}\n")
    git("add", ".")
    source = read_source(folder / "job")
    assert source is not None
    assert source.diff.count("+new ") == 300


def commands_in(trace: Path) -> list[list[str]]:
    """Return the command lines that git has written to a trace (GIT_TRACE2_EVENT)."""
    events = [json.loads(line) for line in trace.read_text().splitlines()]
    return [event["argv"] for event in events if event["event"] == "start"]


def test_with_a_stale_index_only_changed_files_are_diffed(
    tmp_path: Path, folder: Path, git: Git, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A diff of all paths would read every file again. git's own trace shows the paths that it compares."""
    copy, trace = tmp_path / "copy", tmp_path / "trace"
    for number in range(20):
        (folder / "other" / f"{number}.py").write_text(f"{number}\n")
    git("add", ".")
    git("commit", "-q", "-m", "second")
    shutil.copytree(folder, copy)
    stale = subprocess.run(
        ["git", "-C", copy, "diff-files", "--name-only"], check=True, capture_output=True, text=True
    )
    assert len(stale.stdout.splitlines()) == 22
    (copy / "job" / "train.py").write_text("two\n")
    monkeypatch.setenv("GIT_TRACE2_EVENT", str(trace))
    source = read_source(copy)
    assert source is not None
    assert source.diff.count("diff --git") == 1
    (diff,) = [argv for argv in commands_in(trace) if "diff" in argv]
    assert diff[diff.index("--") + 1 :] == [":(top,literal)job/train.py"]


def test_a_detached_head_has_no_branch(folder: Path, git: Git) -> None:
    git("checkout", "-q", "--detach")
    source = read_source(folder)
    assert source is not None
    assert source.branch is None
    assert source.commit == git("rev-parse", "HEAD").strip()


@pytest.mark.usefixtures("git")
def test_a_branch_that_is_not_utf8_can_be_printed(folder: Path) -> None:
    subprocess.run(["git", "-C", folder, "checkout", "-q", "-b", b"caf\xe9"], check=True)
    source = read_source(folder)
    assert source is not None
    assert source.branch == "caf\N{REPLACEMENT CHARACTER}"


@pytest.mark.usefixtures("git")
def test_before_the_first_commit(tmp_path: Path) -> None:
    assert read_source(tmp_path / "repository") == GitSource(None, "main", dirty=False)
    (tmp_path / "repository" / "a.py").write_text("")
    assert read_source(tmp_path / "repository") == GitSource(None, "main", dirty=True)


def test_no_repository_and_no_git(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_source(tmp_path) is None
    assert read_source(tmp_path / "nowhere") is None
    subprocess.run(["git", "init", "-q", "--bare", tmp_path / "bare"], check=True)
    assert read_source(tmp_path / "bare") is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_source(folder) is None


def test_no_program_of_gits_configuration_is_started(
    tmp_path: Path, folder: Path, git: Git
) -> None:
    trap = tmp_path / "trap"
    trap.write_text(f"#!/bin/sh\ntouch {tmp_path}/sprung\ncat\n")
    trap.chmod(0o755)
    (folder / ".gitattributes").write_text("*.py diff=mine\n")
    for name in (
        "core.fsmonitor",
        "diff.external",
        "diff.mine.textconv",
        "diff.mine.command",
        "core.pager",
    ):
        git("config", name, str(trap))
    hook = folder / ".git" / "hooks" / "post-index-change"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(trap.read_text())
    hook.chmod(0o755)
    (folder / "job" / "train.py").write_text("two\n")
    index = (folder / ".git" / "index").read_bytes()
    source = read_source(folder)
    assert source is not None
    assert "+two" in source.diff
    assert not (tmp_path / "sprung").exists()
    assert (folder / ".git" / "index").read_bytes() == index


@pytest.mark.parametrize("command", ["clean", "process"])
def test_no_filter_is_started(tmp_path: Path, folder: Path, git: Git, command: str) -> None:
    trap = tmp_path / "trap"
    trap.write_text(f"#!/bin/sh\ntouch {tmp_path}/sprung\ncat\n")
    trap.chmod(0o755)
    (folder / ".gitattributes").write_text("*.py filter=my.evil\n")
    git("config", f"filter.my.evil.{command}", str(trap))
    (folder / "job" / "train.py").write_text("two\n")
    subprocess.run(["git", "-C", folder, "diff", "HEAD"], check=False, capture_output=True)
    assert (tmp_path / "sprung").exists()  # a plain git diff starts it
    (tmp_path / "sprung").unlink()
    source = read_source(folder / "job")
    assert source is not None
    assert "+two" in source.diff
    assert not (tmp_path / "sprung").exists()


def test_a_required_filter_such_as_lfs_is_no_obstacle(
    tmp_path: Path, folder: Path, git: Git
) -> None:
    large = folder / "job" / "large.dat"
    large.write_text("the content\n")
    os.utime(large, (10**9, 10**9))  # git reads files that are as new as its index
    (folder / "job" / ".gitattributes").write_text("*.dat filter=lfs\n")
    git("config", "filter.lfs.clean", "echo pointer")
    git("add", ".")
    git("commit", "-q", "-m", "second")
    assert git("show", "HEAD:job/large.dat") == "pointer\n"
    for name in ("clean", "smudge", "process"):
        git("config", f"filter.lfs.{name}", f"touch {tmp_path}/sprung; exit 1")
    git("config", "filter.lfs.required", "true")
    source = read_source(folder)
    assert source is not None
    assert (source.dirty, source.diff) == (False, "")
    large.write_text("another content\n")
    source = read_source(folder)
    assert source is not None
    assert source.dirty
    assert "+another content" in source.diff
    assert not (tmp_path / "sprung").exists()


def test_a_filter_that_cannot_be_disabled_gives_no_source(tmp_path: Path, folder: Path) -> None:
    with (folder / ".git" / "config").open("a") as file:
        file.write(f'[filter "a=b"]\n\tclean = "touch {tmp_path}/sprung; cat"\n')
    (folder / ".gitattributes").write_text("*.py filter=a=b\n")
    (folder / "job" / "train.py").write_text("two\n")
    assert read_source(folder) is None
    assert not (tmp_path / "sprung").exists()


def test_nothing_is_fetched(tmp_path: Path, folder: Path, git: Git) -> None:
    trap = tmp_path / "trap"
    trap.write_text(f"#!/bin/sh\ntouch {tmp_path}/sprung\nexit 1\n")
    trap.chmod(0o755)
    blob = git("rev-parse", "HEAD:job/train.py").strip()
    (folder / "job" / "train.py").write_text("two\n")
    (folder / ".git" / "objects" / blob[:2] / blob[2:]).unlink()
    for name, value in {
        "core.repositoryFormatVersion": "1",
        "extensions.partialClone": "origin",
        "remote.origin.url": "ssh://localhost/x",
        "remote.origin.promisor": "true",
        "core.sshCommand": str(trap),
        "protocol.allow": "always",
    }.items():
        git("config", name, value)
    subprocess.run(["git", "-C", folder, "diff", "HEAD"], check=False, capture_output=True)
    assert (tmp_path / "sprung").exists()  # a plain git diff starts it
    (tmp_path / "sprung").unlink()
    source = read_source(folder)
    assert source is not None
    assert source.dirty
    assert not (tmp_path / "sprung").exists()


def test_git_variables_of_a_hook_are_ignored(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = read_source(folder)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "index"))
    assert read_source(folder) == expected


def test_a_long_diff_is_cut(folder: Path) -> None:
    (folder / "job" / "train.py").write_text("a line\n" * MAX_DIFF_BYTES)
    source = read_source(folder)
    assert source is not None
    assert source.diff.endswith("(cut here: the diff is longer)\n")
    assert len(source.diff) < MAX_DIFF_BYTES + 100


def test_secrets_are_not_recorded(folder: Path, git: Git) -> None:
    (folder / ".env").write_text("PASSWORD=one\n")
    git("add", "-f", ".env")
    git("commit", "-q", "-m", "second")
    (folder / ".env").write_text("PASSWORD=hunter2\n")
    (folder / "job" / "train.py").write_text("key = 'AKIA" + "QYLPMN5HFZRT2XWC'\n")
    (folder / "other" / "x.py").write_text("two\n")
    source = read_source(folder)
    assert source is not None
    assert "hunter2" not in source.diff
    assert "QYLPMN5HFZRT2XWC" not in source.diff
    assert "diff --git a/.env b/.env\n(not recorded: looks like a secret)\n" in source.diff
    assert (
        "diff --git a/job/train.py b/job/train.py\n(not recorded: looks like a secret)\n"
        in source.diff
    )
    assert source.diff.endswith("-one\n+two\n")


@pytest.mark.parametrize(
    "name", [".docker/config.json", ".aws/config", "id_ed25519_work", "server.key", ".ENV~"]
)
def test_files_that_are_secrets_by_name_are_not_recorded(folder: Path, git: Git, name: str) -> None:
    path = folder / "job" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("hunter2\n")
    git("add", "-f", ".")
    source = read_source(folder)
    assert source is not None
    assert f"b/job/{name}\n(not recorded: looks like a secret)" in source.diff
    assert "hunter2" not in source.diff


def test_reading_a_source_takes_three_git_commands(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "job" / "train.py").write_text("two\n")
    monkeypatch.setenv("GIT_TRACE2_EVENT", str(tmp_path / "trace"))
    assert read_source(folder) is not None
    started = commands_in(tmp_path / "trace")
    assert [
        [name for name in ("config", "status", "diff") if name in argv] for argv in started
    ] == [
        ["config"],
        ["status"],
        ["diff"],
    ]


def test_code_is_equal_whatever_commit_it_comes_from() -> None:
    assert CodeInfo("d", 1, 1, GitSource("c", "main", dirty=False)) == CodeInfo("d", 1, 1)
