"""Rules about what a bundle includes: ignore files, git's behaviour, and the defaults."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.code_folders import user_file_names, write_tree
from support.sizes import tries

from cloudtrain.bundle import collect
from cloudtrain.bundle.ignore import escape
from cloudtrain.errors import BundleError
from cloudtrain.runs.known_runs import record_run
from cloudtrain.support.home_folder import make_home

DOWNLOAD = "digits-261120-101500-1a2b3c"


def test_ignore_files_apply_with_nesting_and_negation(tmp_path: Path) -> None:
    folder = write_tree(
        tmp_path / "a",
        keep_py="",
        logs__a="",
        sub__x_txt="",
        sub__y_txt="",
        data__big="",
        top_txt="",
    )
    (folder / ".gitignore").write_text("logs/\n*_txt\n/data\n")
    (folder / "sub" / ".gitignore").write_text("!y_txt\n")
    (folder / ".cloudtrainignore").write_text("!/data\n")
    assert user_file_names(folder) == [
        ".cloudtrainignore",
        ".gitignore",
        "data/big",
        "keep.py",
        "sub/.gitignore",
        "sub/y_txt",
    ]


def test_history_environments_and_caches_are_excluded(tmp_path: Path) -> None:
    folder = write_tree(
        tmp_path / "a",
        a_py="",
        env311__pyvenv_cfg="",
        mine__conda_meta__x="",
        cache__CACHEDIR_TAG="",
    )
    (folder / "env311" / "pyvenv_cfg").rename(folder / "env311" / "pyvenv.cfg")
    (folder / "mine" / "conda_meta").rename(folder / "mine" / "conda-meta")
    (folder / "cache" / "CACHEDIR_TAG").rename(folder / "cache" / "CACHEDIR.TAG")
    for name in (".git", ".venv", "__pycache__", ".cloudtrain", "x.egg-info", DOWNLOAD):
        (folder / name).mkdir()
        (folder / name / "file").write_text("x")
    for name in ("a.pyc", f"{DOWNLOAD}.html", "cloudtrain-report.html"):
        (folder / name).write_text("x")
    assert user_file_names(folder) == ["a.py"]
    assert {left.name: left.reason for left in collect(folder).left_out} == {
        ".cloudtrain/": "runs of cloudtrain",
        ".git/": "version control",
        ".venv/": "virtual environment",
        "__pycache__/": "cache",
        "a.pyc": "cache",
        "cache/": "cache",
        f"{DOWNLOAD}/": "downloaded results of a run",
        f"{DOWNLOAD}.html": "report of a run",
        "cloudtrain-report.html": "report of a run",
        "env311/": "virtual environment",
        "mine/": "conda environment",
        "x.egg-info/": "build output",
    }


def test_the_record_of_runs_does_not_change_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tree(tmp_path / "home", train_py="")
    monkeypatch.setenv("HOME", str(folder))
    before = collect(folder).info.digest
    for run in ("digits-261120-101500-1a2b3c", "digits-261120-101501-2a2b3c"):
        record_run(os.environ, f"local:{run}", folder)
        make_home(folder)
        assert collect(folder).info.digest == before
    assert (folder / ".config/cloudtrain/runs.jsonl").read_text().count("digits") == 2
    left = {each.name: each.reason for each in collect(folder).left_out}
    assert left == {
        ".config/cloudtrain/": "settings and record of cloudtrain",
        ".home-id": "id of a folder of local runs",
    }
    (folder / ".cloudtrainignore").write_text("!/.config/cloudtrain/\n")
    assert ".config/cloudtrain/runs.jsonl" in user_file_names(folder)


def test_results_and_large_data_are_excluded_and_reported(tmp_path: Path) -> None:
    folder = write_tree(
        tmp_path / "a",
        a_py="",
        model_pt="x",
        small_csv="1,2",
        checkpoints__step="x",
        wandb__run="x",
        logs__events="x",
        checkpoints2__init_py="",
    )
    (folder / "model_pt").rename(folder / "model.pt")
    (folder / "small_csv").rename(folder / "small.csv")
    (folder / "logs" / "events").rename(folder / "logs" / "events.out.tfevents.1.host")
    (folder / "wandb" / "__init__.py").write_text("# a package of this name is code")
    with (folder / "large.csv").open("wb") as file:
        file.truncate(10_000_001)
    contents = collect(folder)
    assert user_file_names(folder) == [
        "a.py",
        "checkpoints2/init.py",
        "small.csv",
        "wandb/__init__.py",
        "wandb/run",
    ]
    assert [(left.name, left.bytes) for left in contents.left_out if left.is_by_default] == [
        ("checkpoints/", None),
        ("large.csv", 10_000_001),
        ("logs/events.out.tfevents.1.host", 1),
        ("model.pt", 1),
    ]


def test_negation_overrides_all_but_history_and_runs(tmp_path: Path) -> None:
    folder = write_tree(
        tmp_path / "a",
        venv__x_py="",
        checkpoints__base="x",
        out__a="x",
        out__b="x",
        data__k__z="",
        k_pt="x",
    )
    for name in (".git", ".cloudtrain", "out/__pycache__"):
        (folder / name).mkdir(parents=True)
        (folder / name / "file").write_text("x")
    (folder / ".gitignore").write_text("/out/\n/data/\n")
    (folder / ".cloudtrainignore").write_text(
        "!.git\n!.cloudtrain\n!venv\n!/checkpoints/base\n!/out/\n!/data/k/z\n!k_pt\n"
    )
    assert user_file_names(folder)[2:] == [
        "checkpoints/base",
        "data/k/z",
        "k_pt",
        "out/a",
        "out/b",
        "venv/x.py",
    ]
    whys = {entry.name: entry.why for entry in collect(folder).entries}
    assert whys["out/a"] == "named in .cloudtrainignore"
    assert whys["cloudtrain_worker.py"] == "runtime of cloudtrain"
    reasons = {left.name: left.reason for left in collect(folder).left_out}
    assert (
        reasons["data/"] == ".gitignore:2: /data/ (except for what .cloudtrainignore names in it)"
    )
    assert reasons["out/__pycache__/"] == "cache"


def test_an_allow_list_with_wildcards_names_no_secret(tmp_path: Path) -> None:
    folder = write_tree(tmp_path / "a", a_py="", notes="", sub__b_py="", venv__c_py="")
    (folder / ".env").write_text("x")
    (folder / ".cloudtrainignore").write_text("*\n!*/\n!*.py\n")
    assert user_file_names(folder) == ["a.py", "sub/b.py"]


def test_each_exclusion_has_a_reason(tmp_path: Path) -> None:
    folder = write_tree(tmp_path / "a", a_py="", sub__deep__b_py="", c_py="")
    (folder / ".gitignore").write_text("# sources\n\nsub/\n")
    (folder / ".cloudtrainignore").write_text("c.py\n")
    contents = collect(folder)
    assert contents.exclusion_reason("a.py") is None
    assert contents.exclusion_reason("nowhere.py") is None
    assert contents.exclusion_reason("./c.py") == ".cloudtrainignore:1: c.py"
    assert contents.exclusion_reason("sub/deep/b.py") == ".gitignore:3: sub/"


def test_ignore_files_above_the_code_folder_apply(tmp_path: Path) -> None:
    folder = write_tree(tmp_path / "r" / "jobs" / "a", a_py="", b_txt="", c_log="")
    (tmp_path / ".gitignore").write_text("*\n")
    (tmp_path / "r" / ".gitignore").write_text("/jobs/a/b_txt\n*_log\n")
    assert "b_txt" in user_file_names(folder)
    (tmp_path / "r" / ".git").mkdir()
    assert user_file_names(folder) == ["a.py"]
    assert collect(folder).exclusion_reason("b_txt") == "../../.gitignore:1: /jobs/a/b_txt"


PIECES = [
    "a",
    "b",
    "ab",
    "*",
    "?",
    "**",
    "*.py",
    "[ab]",
    "a*",
    "*b",
    "[!a]",
    "a.py",
    "\\a",
    "a**",
    "[a-b]*",
    "***",
]

PIECES += ["a[!b]*", "[^b]?", "[]a]", "[a-]*", "\\[a]", "**b", "[%-a]", "a-b", "c d", "#", "\\!a"]

NAMES = st.sampled_from(["a", "b", "ab", "a.py", "b.txt", "c d", "[a]", "a-b", "#", "!a"])

PATHS = st.lists(st.lists(NAMES, min_size=1, max_size=4).map("/".join), min_size=1, max_size=14)


def known_to_differ(pattern: str) -> bool:
    """Return whether docs/decisions/009 lists a pattern's form: three stars alone, or letters before two stars."""
    path = pattern.rstrip(" ").removeprefix("!").removesuffix("/")
    alone, behind_letters = r"(^|/)\*{3,}(/|$)", r"^[^*?\[\\]*[^*?\[\\/]\*{2,}(/|$)"
    return "/" in path and re.search(f"{alone}|{behind_letters}", path) is not None


PATTERNS = st.builds(
    lambda sign, root, parts, end: f"{sign}{root}{'/'.join(parts)}{end}",
    st.sampled_from(["", "", "!"]),
    st.sampled_from(["", "", "", "/"]),
    st.lists(st.sampled_from(PIECES), min_size=1, max_size=3),
    st.sampled_from(["", "", "/", " "]),
).filter(lambda pattern: not known_to_differ(pattern))


def create_files(folder: Path, names: list[str]) -> None:
    """Create empty files. Skip a name below a file, or of a folder."""
    for name in names:
        path = folder / name
        if not any(above.is_file() for above in path.parents) and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("")


def names_by_git(folder: Path) -> list[str]:
    environ = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}
    subprocess.run(["git", "init", "-q", folder], check=True, env=environ)
    listing = ["git", "-C", folder, "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    kept = subprocess.run(listing, check=True, env=environ, capture_output=True).stdout
    return sorted(filter(None, os.fsdecode(kept).split("\0")))


@settings(
    max_examples=tries(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(paths=PATHS, top=st.lists(PATTERNS, max_size=4), below=st.lists(PATTERNS, max_size=3))
def test_ignore_files_match_git(
    tmp_path_factory: pytest.TempPathFactory, paths: list[str], top: list[str], below: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("tree")
    create_files(folder, paths)
    (folder / ".gitignore").write_text("\n".join(top))
    if (folder / "a").is_dir():
        (folder / "a" / ".gitignore").write_text("\n".join(below))
    assert user_file_names(folder) == names_by_git(folder)


COMMON_PATTERNS = [
    "*.py",
    "*.lo[gh]",
    "/build",
    "data/",
    "data/*\n!data/keep",
    "data/**\n!data/**/\n!data/**/*.csv",
    "a/**/b",
]

COMMON_PATTERNS += [
    "[Dd]ebug/",
    "\\#file",
    "\\!x",
    "notes   ",
    "sp\\ ",
    "**/logs",
    "**/logs/",
    "foo/*",
    "foo/*\n!foo/bar",
    "doc/x",
]

COMMON_PATTERNS += [
    "/*\n!/foo",
    "*\n!*/\n!*.py",
    "foo/**",
    "foo/**/*",
    "/**/b",
    "**",
    "**/*",
    "*/",
    "*/**",
    "*/**/",
    "foo/**/",
]

COMMON_PATTERNS += [
    "foo\n!foo/bar",
    "Icon\r\r",
    "~$*",
    "/data[!0-9]*",
    "a/**/**/b",
    "!x",
    "!",
    "/",
    "a//b",
    "tab\t",
]

COMMON_NAMES = [
    "a.py",
    "a.log",
    "build",
    "foo/build",
    "data/keep",
    "data/x/k.csv",
    "data/x/k.txt",
    "data1/x",
    "datax/y",
    "a/b",
]

COMMON_NAMES += [
    "a/c/d/b",
    "b",
    "debug/x",
    "Debug/x",
    "c/Debug/x",
    "#file",
    "!x",
    "x",
    "notes",
    "sp ",
    "sp",
    "logs",
    "c/logs",
]

COMMON_NAMES += [
    "d/logs/x",
    "foo/bar",
    "foo/sub/bar",
    "foo/sub/b",
    "doc/x",
    "c/doc/x",
    "Icon",
    "Icon\r",
    "~$x",
    "tab\t",
    "tab",
]


@pytest.mark.parametrize("lines", COMMON_PATTERNS)
def test_common_ignore_patterns_match_git(tmp_path: Path, lines: str) -> None:
    folder = tmp_path / "a"
    create_files(folder, COMMON_NAMES)
    (folder / ".gitignore").write_text(lines + "\n", newline="")
    assert user_file_names(folder) == names_by_git(folder)


@pytest.mark.parametrize(
    ("lines", "name"),
    [
        ("***/b", "x/y/b"),
        ("x/***/b", "x/y/z/b"),
        ("a**/b", "a/c/b"),
        ("a**/b", "ab"),
        ("/a**\n!/ab/", "ab/c"),
    ],
)
def test_pathspec_follows_the_manual_where_git_does_not(
    tmp_path: Path, lines: str, name: str
) -> None:
    create_files(tmp_path / "a", [name])
    (tmp_path / "a" / ".gitignore").write_text(lines)
    assert all(known_to_differ(line) for line in lines.split("\n")[:1])
    assert name in user_file_names(tmp_path / "a")
    assert name not in names_by_git(tmp_path / "a")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"ok\n\xff\xfe\n", r"\.gitignore:2: not valid UTF-8"),
        (
            b"ok\n*.log\n[ab\n",
            r"\.gitignore:3: \[ab is not a valid pattern: a bracket must be closed",
        ),
        (b"x\\\n", r"\.gitignore:1: x\\ is not a valid pattern: Escape character"),
        (b"a\\/b\n", r"\.gitignore:1: .* Escape character"),
        (b"[[:digit:]]\n", r"\.gitignore:1: .*such as \[0-9\] for"),
        (b"!x[^a[:space:]]\n", r"\.gitignore:1: !x"),
        (b"\\\\[]\\]]\n", r"\.gitignore:1: .*a bracket"),
        (b"[a/b]\n", r"\.gitignore:1: .*a bracket"),
        (b"[a--z]\n", r"\.gitignore:1: .*a bracket"),
        (b"//\n", r"\.gitignore:1: // is not a valid pattern: it matches nothing"),
        (b"[z-a]\n", r"\.gitignore:1: .*bad character range z-a"),
    ],
)
def test_a_broken_ignore_file_is_reported_with_its_line(
    tmp_path: Path, content: bytes, expected: str
) -> None:
    folder = write_tree(tmp_path / "a", a_py="")
    (folder / ".gitignore").write_bytes(content)
    with pytest.raises(BundleError, match=expected):
        collect(folder)


def test_ignore_files_with_crlf_or_bom_are_read(tmp_path: Path) -> None:
    folder = write_tree(tmp_path / "a", a_py="", x="", y="")
    (folder / ".gitignore").write_bytes(b"\xef\xbb\xbfx\r\ny\r\n")
    assert user_file_names(folder) == [".gitignore", "a.py"]


@pytest.mark.parametrize(
    "name", ["plain", "with space ", "st*r", "[x]", "back\\slash", "!bang", "#hash", "a b/c"]
)
def test_the_suggested_ignore_line_matches_that_file(tmp_path: Path, name: str) -> None:
    folder = write_tree(tmp_path / "a", a_py="")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("x")
    (folder / ".cloudtrainignore").write_text(f"{escape(name)}\n")
    assert user_file_names(folder) == [".cloudtrainignore", "a.py"]
