import gzip
import hashlib
import json
import os
import re
import socket
import subprocess
import tarfile
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import certifi
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cloudtrain.bundle import collect, list_contents
from cloudtrain.bundle.archive import write_bundle
from cloudtrain.bundle.digests import Digests
from cloudtrain.bundle.ignore import escape
from cloudtrain.errors import BundleError
from cloudtrain.secrets.scanner import scan_folder, scan_text

ID = "AKIA" + "QYLPMN5HFZRT2XWC"
SECRET = "kT9" + "x7Qm2Lr8Vb4Nc6Zs1Wd3Fg5Hj0Kp+YuIoPaSd"[:37]

MIXED = "kT9x7Qm2Lr8Vb4Nc6Zs1Wd3Fg5Hj0KpAyUiOe4Gt"
HEX = "3f9a0c7e5b1d8264a7c0e9f13b5d2846c0a9e7f1"
CERTIFICATE = "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"
PRIVATE = "-----BEGIN EC " + "PRIVATE KEY-----\nMIIE\n-----END EC " + "PRIVATE KEY-----\n"


def tree(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        path = folder / name.replace("__", "/").replace("_py", ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return folder


def own_names(folder: Path) -> list[str]:
    return [entry.name for entry in collect(folder).entries if not entry.name.startswith("cloudtrain_")]


def test_equal_code_gives_an_identical_archive(tmp_path: Path) -> None:
    first = tree(tmp_path / "a", b_py="2", a_py="1", sub__c_py="3")
    second = tree(tmp_path / "b", sub__c_py="3", a_py="1", b_py="2")
    for path in second.rglob("*"):
        os.utime(path, (1, 1))
    (second / "a.py").chmod(0o600)
    one, two = (write_bundle(collect(folder), tmp_path / f"out-{folder.name}") for folder in (first, second))
    assert one.info == two.info
    assert one.path.read_bytes() == two.path.read_bytes()


def test_names_modes_and_contents_change_the_digest(tmp_path: Path) -> None:
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
    assert "cloudtrain_runtime/contract/manifest.py" in names
    assert (member.mtime, member.uid, member.uname, member.mode) == (0, 0, "", 0o644)


def test_an_existing_archive_is_reused(tmp_path: Path) -> None:
    contents = collect(tree(tmp_path / "a", a_py="1"))
    first = write_bundle(contents, tmp_path / "out").path
    before = first.stat().st_mtime_ns
    assert write_bundle(contents, tmp_path / "out").path == first
    assert first.stat().st_mtime_ns == before


def test_ignore_files_apply_with_nesting_and_negation(tmp_path: Path) -> None:
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


def test_history_environments_and_caches_are_excluded(tmp_path: Path) -> None:
    folder = tree(tmp_path / "a", a_py="", env311__pyvenv_cfg="", mine__conda_meta__x="", cache__CACHEDIR_TAG="")
    (folder / "env311" / "pyvenv_cfg").rename(folder / "env311" / "pyvenv.cfg")
    (folder / "mine" / "conda_meta").rename(folder / "mine" / "conda-meta")
    (folder / "cache" / "CACHEDIR_TAG").rename(folder / "cache" / "CACHEDIR.TAG")
    for name in (".git", ".venv", "__pycache__", ".cloudtrain", "x.egg-info"):
        (folder / name).mkdir()
        (folder / name / "file").write_text("x")
    (folder / "a.pyc").write_text("x")
    assert own_names(folder) == ["a.py"]
    assert {left.name: left.reason for left in collect(folder).left_out} == {
        ".cloudtrain/": "runs of cloudtrain",
        ".git/": "version control",
        ".venv/": "virtual environment",
        "__pycache__/": "cache",
        "a.pyc": "cache",
        "cache/": "cache",
        "env311/": "virtual environment",
        "mine/": "conda environment",
        "x.egg-info/": "build output",
    }


def test_results_and_large_data_are_excluded_and_reported(tmp_path: Path) -> None:
    folder = tree(
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
    (folder / "wandb" / "__init__.py").write_text("# a package of that name, so code")
    with (folder / "large.csv").open("wb") as file:
        file.truncate(10_000_001)
    contents = collect(folder)
    assert own_names(folder) == ["a.py", "checkpoints2/init.py", "small.csv", "wandb/__init__.py", "wandb/run"]
    assert [(left.name, left.bytes) for left in contents.left_out if left.is_by_default] == [
        ("checkpoints/", None),
        ("large.csv", 10_000_001),
        ("logs/events.out.tfevents.1.host", 1),
        ("model.pt", 1),
    ]


def test_negation_overrides_all_but_history_and_runs(tmp_path: Path) -> None:
    folder = tree(tmp_path / "a", venv__x_py="", checkpoints__base="x", out__a="x", out__b="x", data__k__z="", k_pt="x")
    for name in (".git", ".cloudtrain", "out/__pycache__"):
        (folder / name).mkdir(parents=True)
        (folder / name / "file").write_text("x")
    (folder / ".gitignore").write_text("/out/\n/data/\n")
    (folder / ".cloudtrainignore").write_text(
        "!.git\n!.cloudtrain\n!venv\n!/checkpoints/base\n!/out/\n!/data/k/z\n!k_pt\n"
    )
    assert own_names(folder)[2:] == ["checkpoints/base", "data/k/z", "k_pt", "out/a", "out/b", "venv/x.py"]
    whys = {entry.name: entry.why for entry in collect(folder).entries}
    assert whys["out/a"] == "named in .cloudtrainignore"
    assert whys["cloudtrain_worker.py"] == "runtime of cloudtrain"
    reasons = {left.name: left.reason for left in collect(folder).left_out}
    assert reasons["data/"] == ".gitignore:2: /data/ (except for what .cloudtrainignore names in it)"
    assert reasons["out/__pycache__/"] == "cache"


def test_an_allow_list_with_wildcards_names_no_secret(tmp_path: Path) -> None:
    folder = tree(tmp_path / "a", a_py="", notes="", sub__b_py="", venv__c_py="")
    (folder / ".env").write_text("x")
    (folder / ".cloudtrainignore").write_text("*\n!*/\n!*.py\n")
    assert own_names(folder) == ["a.py", "sub/b.py"]


def test_each_exclusion_has_a_reason(tmp_path: Path) -> None:
    folder = tree(tmp_path / "a", a_py="", sub__deep__b_py="", c_py="")
    (folder / ".gitignore").write_text("# sources\n\nsub/\n")
    (folder / ".cloudtrainignore").write_text("c.py\n")
    contents = collect(folder)
    assert contents.exclusion_reason("a.py") is None
    assert contents.exclusion_reason("nowhere.py") is None
    assert contents.exclusion_reason("./c.py") == ".cloudtrainignore:1: c.py"
    assert contents.exclusion_reason("sub/deep/b.py") == ".gitignore:3: sub/"


def test_ignore_files_above_the_code_folder_apply(tmp_path: Path) -> None:
    folder = tree(tmp_path / "r" / "jobs" / "a", a_py="", b_txt="", c_log="")
    (tmp_path / ".gitignore").write_text("*\n")
    (tmp_path / "r" / ".gitignore").write_text("/jobs/a/b_txt\n*_log\n")
    assert "b_txt" in own_names(folder)
    (tmp_path / "r" / ".git").mkdir()
    assert own_names(folder) == ["a.py"]
    assert collect(folder).exclusion_reason("b_txt") == "../../.gitignore:1: /jobs/a/b_txt"


PIECES = ["a", "b", "ab", "*", "?", "**", "*.py", "[ab]", "a*", "*b", "[!a]", "a.py", "\\a", "a**", "[a-b]*", "***"]
PIECES += ["a[!b]*", "[^b]?", "[]a]", "[a-]*", "\\[a]", "**b", "[%-a]", "a-b", "c d", "#", "\\!a"]
NAMES = st.sampled_from(["a", "b", "ab", "a.py", "b.txt", "c d", "[a]", "a-b", "#", "!a"])
PATHS = st.lists(st.lists(NAMES, min_size=1, max_size=4).map("/".join), min_size=1, max_size=14)


def known_to_differ(pattern: str) -> bool:
    """Whether a pattern has a form of docs/decisions/009: three stars alone, or letters before two stars, in a path."""
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


def fill(folder: Path, paths: list[str]) -> None:
    for path in paths:
        place = folder / path
        if not any(above.is_file() for above in place.parents) and not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text("")


def names_by_git(folder: Path) -> list[str]:
    environ = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}
    subprocess.run(["git", "init", "-q", folder], check=True, env=environ)
    listing = ["git", "-C", folder, "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    kept = subprocess.run(listing, check=True, env=environ, capture_output=True).stdout
    return sorted(filter(None, os.fsdecode(kept).split("\0")))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(paths=PATHS, top=st.lists(PATTERNS, max_size=4), below=st.lists(PATTERNS, max_size=3))
def test_ignore_files_match_git(
    tmp_path_factory: pytest.TempPathFactory, paths: list[str], top: list[str], below: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("tree")
    fill(folder, paths)
    (folder / ".gitignore").write_text("\n".join(top))
    if (folder / "a").is_dir():
        (folder / "a" / ".gitignore").write_text("\n".join(below))
    assert own_names(folder) == names_by_git(folder)


WRITTEN = ["*.py", "*.lo[gh]", "/build", "data/", "data/*\n!data/keep", "data/**\n!data/**/\n!data/**/*.csv", "a/**/b"]
WRITTEN += [
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
WRITTEN += ["/*\n!/foo", "*\n!*/\n!*.py", "foo/**", "foo/**/*", "/**/b", "**", "**/*", "*/", "*/**", "*/**/", "foo/**/"]
WRITTEN += ["foo\n!foo/bar", "Icon\r\r", "~$*", "/data[!0-9]*", "a/**/**/b", "!x", "!", "/", "a//b", "tab\t"]
TREE = ["a.py", "a.log", "build", "foo/build", "data/keep", "data/x/k.csv", "data/x/k.txt", "data1/x", "datax/y", "a/b"]
TREE += ["a/c/d/b", "b", "debug/x", "Debug/x", "c/Debug/x", "#file", "!x", "x", "notes", "sp ", "sp", "logs", "c/logs"]
TREE += ["d/logs/x", "foo/bar", "foo/sub/bar", "foo/sub/b", "doc/x", "c/doc/x", "Icon", "Icon\r", "~$x", "tab\t", "tab"]


@pytest.mark.parametrize("lines", WRITTEN)
def test_common_ignore_patterns_match_git(tmp_path: Path, lines: str) -> None:
    folder = tmp_path / "a"
    fill(folder, TREE)
    (folder / ".gitignore").write_text(lines + "\n", newline="")
    assert own_names(folder) == names_by_git(folder)


@pytest.mark.parametrize(
    ("lines", "name"),
    [("***/b", "x/y/b"), ("x/***/b", "x/y/z/b"), ("a**/b", "a/c/b"), ("a**/b", "ab"), ("/a**\n!/ab/", "ab/c")],
)
def test_pathspec_follows_the_manual_where_git_does_not(tmp_path: Path, lines: str, name: str) -> None:
    fill(tmp_path / "a", [name])
    (tmp_path / "a" / ".gitignore").write_text(lines)
    assert all(known_to_differ(line) for line in lines.split("\n")[:1])
    assert name in own_names(tmp_path / "a")
    assert name not in names_by_git(tmp_path / "a")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"ok\n\xff\xfe\n", r"\.gitignore:2: not valid UTF-8"),
        (b"ok\n*.log\n[ab\n", r"\.gitignore:3: \[ab is not a valid pattern: a bracket must be closed"),
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
def test_a_broken_ignore_file_is_reported_with_its_line(tmp_path: Path, content: bytes, expected: str) -> None:
    folder = tree(tmp_path / "a", a_py="")
    (folder / ".gitignore").write_bytes(content)
    with pytest.raises(BundleError, match=expected):
        collect(folder)


def test_ignore_files_with_crlf_or_bom_are_read(tmp_path: Path) -> None:
    folder = tree(tmp_path / "a", a_py="", x="", y="")
    (folder / ".gitignore").write_bytes(b"\xef\xbb\xbfx\r\ny\r\n")
    assert own_names(folder) == [".gitignore", "a.py"]


@pytest.mark.parametrize("name", ["plain", "with space ", "st*r", "[x]", "back\\slash", "!bang", "#hash", "a b/c"])
def test_the_suggested_ignore_line_matches_that_file(tmp_path: Path, name: str) -> None:
    folder = tree(tmp_path / "a", a_py="")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("x")
    (folder / ".cloudtrainignore").write_text(f"{escape(name)}\n")
    assert own_names(folder) == [".cloudtrainignore", "a.py"]


# ---------------------------------------------------------------- secrets

SECRETS = {
    "AWS access key id": f"key = '{ID}'",
    "AWS secret access key": f'aws_secret_access_key = "{SECRET}"',
    "GitHub token": "ghp_" + MIXED[:36],
    "GitLab token": "glpat-" + MIXED[:9] + "-_" + MIXED[:9],
    "Hugging Face token": "hf_" + "qWmZnXbVcLkPjHgFdSaQwEtRyUiOpMnBvC",
    "OpenAI or Anthropic key": "sk-ant-api03-" + MIXED[:9] + "-_" + MIXED[:20],
    "Slack token": "xoxb-" + "123456789012-abcdef",
    "Google API key": "AIza" + "Sy_-" + MIXED[:31],
    "npm token": "npm_" + MIXED[:36],
    "PyPI token": "pypi-AgE" + MIXED + "-_x4",
    "Stripe key": "sk_live_" + MIXED[:24],
    "JSON web token": "eyJhbGciOiJIUzI1NiJ9" + ".eyJzdWIiOiIxMjM0In0" + ".c2lnbmF0dXJl",
    "Weights & Biases key": f"WANDB_API_KEY={HEX}",
    "private key": "-----BEGIN RSA " + "PRIVATE KEY-----\nMIIE",
}


@pytest.mark.parametrize("kind", SECRETS)
def test_tokens_are_refused_with_their_line_and_not_printed(tmp_path: Path, kind: str) -> None:
    folder = tree(tmp_path / "a", train_py=f"import os\n\n{SECRETS[kind]}\n")
    with pytest.raises(BundleError) as caught:
        collect(folder)
    assert f"train.py:3: {kind}" in str(caught.value)
    assert "!/train.py" in caught.value.hint
    assert SECRETS[kind][-12:] not in str(caught.value)
    (folder / ".cloudtrainignore").write_text("!train.py\n")
    assert own_names(folder) == [".cloudtrainignore", "train.py"]


AWS, WANDB, KEY = "AWS secret access key", "Weights & Biases key", "AWS_SECRET_ACCESS_KEY"
WAYS = [
    (AWS, f'os.environ["{KEY}"] = "{SECRET}"'),
    (AWS, f"os.environ['{KEY}']='{SECRET}'"),
    (AWS, f'os.environ.setdefault("{KEY}", "{SECRET}")'),
    (AWS, f'key = os.environ.get("{KEY}", default="{SECRET}")'),
    (AWS, f'key = os.getenv("{KEY}") or "{SECRET}"'),
    (AWS, rf'   "os.environ[\"{KEY}\"] = \"{SECRET}\"\n",'),
    (AWS, f'{KEY}: str = r"{SECRET}"'),
    (AWS, f"ENV {KEY} {SECRET}"),
    (AWS, f"%env {KEY}={SECRET}"),
    (AWS, f"aws configure set {KEY.lower()} {SECRET}"),
    (AWS, f'environment {{ name = "{KEY}", value = "{SECRET}" }}'),
    (AWS, f"  - name: {KEY}\n    value: {SECRET}"),
    (AWS, f'{{"SecretAccessKey": "{SECRET}"}}'),
    (WANDB, f"os.environ['WANDB_API_KEY']='{HEX}'"),
    (WANDB, f'os.environ.setdefault("WANDB_API_KEY", "{HEX}")'),
    (WANDB, f"wandb_api_key: {HEX}"),
    (WANDB, f"ENV WANDB_API_KEY {HEX}"),
    (WANDB, f"wandb login {HEX}"),
    (WANDB, f"RUN wandb login --relogin --host=https://api.wandb.ai {HEX}"),
    (WANDB, f'subprocess.run(["wandb", "login", "{HEX}"])'),
    (WANDB, f'wandb.login(relogin=True, key="{HEX}")'),
    (WANDB, f'wandb.login(\n    relogin=True,\n    key="{HEX}",\n)'),
    (WANDB, f"machine api.wandb.ai\n  login user\n  password {HEX}"),
    (WANDB, f"key = 'wandb_v1_{MIXED[:27]}_{MIXED}Qx9kT2Lmr'"),
]


@pytest.mark.parametrize(("kind", "text"), WAYS)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"])
def test_tokens_are_found_in_every_notation(kind: str, text: str, encoding: str) -> None:
    assert scan_text(f"first\n\n{text}\n".encode(encoding)) == [(3, kind)]


@pytest.mark.parametrize(
    "text",
    [
        "AKIA" + "IOSFODNN7EXAMPLE",
        "aws_secret_access_key = wJalrXUtnFEMI/K7MDENG/bPxRfiCY" + "EXAMPLEKEY",
        "if '-----BEGIN PRIVATE KEY-----' in text:",
        "sklearn.pipeline.make_pipeline_with_a_very_long_name_indeed()",
        "sha256:" + hashlib.sha256(b"").hexdigest(),
        "hf_hub_download(repo_id='org/model', filename='model.bin')",
        "task-aware-learning-rate-schedules-for-transformers",
        "hf_" + "datasetloaderconfigurationregistries",
        "hf_" + "datasetLoaderConfigurationRegistryName",
        "sk-" + "learnlearnlearnlearnlearnlearnlearnlearn",
        "ASIANDEVELOPMENTBANK",
        "password " + "0" * 40,
        f"password {HEX}",
        "wandb_api_key: " + "0" * 40,
        "ghp_" + "x" * 36,
        f"secret_key: {HEX}",
        "secret access key org/apache/hadoop/fs/SxAccessKeyProvider",
    ],
)
def test_text_that_resembles_a_token_is_included(text: str) -> None:
    assert scan_text(text.encode()) == []


def test_tokens_are_found_in_text_but_not_in_binaries() -> None:
    for padding in (0, 1, 19, 20, 47, 48, 49, 127, 128, 129, 4000):
        for filler in (b"x", b" ", b"x ", b"-"):
            data = (filler * padding)[:padding] + b" " + ID.encode() + b" " + filler * padding
            assert scan_text(data) == [(1, "AWS access key id")], (padding, filler)
    assert scan_text(b"\0" + ID.encode()) == []


NAMED_SECRETS = [".env", ".env.production", "prod.env", "id_rsa", ".netrc", "credentials", "client_secret_1.json"]
NAMED_SECRETS += ["terraform.tfstate", "kaggle.json", "store.p12", "secrets.toml", ".ENV", ".Env", ".env~", ".env-prod"]
NAMED_SECRETS += [".env_prod", "env.prod", ".flaskenv", "id_rsa.bak", "id_ed25519_work", ".huggingface/token"]
NAMED_SECRETS += ["aws_credentials", "credentials.txt", "#.env#", ".env.bak.old", "terraform.tfstate.backup"]


@pytest.mark.parametrize("name", NAMED_SECRETS)
def test_secret_files_are_refused_unless_named(tmp_path: Path, name: str) -> None:
    folder = tree(tmp_path / "a", a_py="", sub__b_py="")
    (folder / "sub" / name).parent.mkdir(exist_ok=True)
    (folder / "sub" / name).write_text("x")
    with pytest.raises(BundleError, match=f"sub/{re.escape(name)}: "):
        collect(folder)
    (folder / ".cloudtrainignore").write_text(f"/sub/{name}\n")
    assert f"sub/{name}" not in own_names(folder)
    (folder / ".cloudtrainignore").write_text(f"!/sub/{name}\n")
    assert f"sub/{name}" in own_names(folder)
    (folder / ".cloudtrainignore").unlink()
    (folder / ".gitignore").write_text(f"/sub/{name}\n")
    assert f"sub/{name}" not in own_names(folder)


SEQUENCE, RSA = b"\x30\x82\x04\xa4", b"\x2a\x86\x48\x86\xf7\x0d\x01"
SUSPECTS = [
    ("server.pem", CERTIFICATE.encode() + PRIVATE.encode(), ":4: private key"),
    ("server.key", PRIVATE.encode("utf-16"), ":1: private key"),
    ("pkcs8.der", SEQUENCE + b"\x02\x01\x00\x30\x0d\x06\x09" + RSA + b"\x01", ": private key"),
    ("pkcs1.key", SEQUENCE + b"\x02\x01\x00\x02\x82\x01\x01\x00", ": private key"),
    ("encrypted.p8", b"\x30\x82\x01\x00\x30\x1c\x06\x0a" + RSA + b"\x0c\x01", ": private key"),
    ("encrypted.key", b"\x30\x82\x01\x00\x30\x57\x06\x09" + RSA + b"\x05\x0d", ": private key"),
    ("a.ppk", b"PuTTY-User-Key-File-3: ssh-ed25519\n", ":1: private key"),
    ("fernet.key", f"{MIXED}abc=\n".encode(), ":1: private key"),
    ("x.env.bak", b"# mine\nDB_PASSWORD=hunter2\n", ":2: environment file"),
    ("x.env", b"DATABASE=postgres://me:hunter2@host/db\n", ":1: environment file"),
    ("credentials.json", b'{\n "client_secret": "GOCSPX-abc"}', ":2: credentials"),
    (".docker/config.json", b'{"auths": {"x": {"auth": "bWU6cHc="}}}', ":1: passwords of registries"),
    (".npmrc", b"//registry.npmjs.org/:_authToken=abc\n", ":1: npm token"),
]
HARMLESS = [
    ("cacert.pem", CERTIFICATE.encode()),
    ("cert.der", SEQUENCE + b"\x30\x82\x03\x8c\xa0\x03\x02\x01\x02"),
    ("public.key", b"-----BEGIN PUBLIC KEY-----\nMIIB\n-----END PUBLIC KEY-----\n"),
    ("slides.key", b"PK\x03\x04\x14\x00\x00\x00"),
    ("piano.key", b"C D E F G A B\n"),
    ("requirements.p8", b"torch==2.6\n"),
    ("gym.env", b"CartPole-v1\n"),
    ("multi.env", b"SEED=1\nMODE=train\n"),
    ("x.env", b"API_KEY=${API_KEY}\nTOKEN=\nDEBUG=1\n"),
    ("credentials.json", b'{"token_uri": "https://oauth2.example.org/token", "client_secret": "<your secret>"}'),
    (".docker/config.json", b'{"auths": {}, "credsStore": "ecr-login"}'),
    (".npmrc", b"//registry.npmjs.org/:_authToken=${NPM_TOKEN}\n"),
    ("config.json", b'{"auth": "basic"}'),
    ("example.env", b"PASSWORD=hunter2\n"),
    ("env.py", b""),
]


@pytest.mark.parametrize(("name", "content", "expected"), SUSPECTS)
def test_content_decides_about_ambiguous_file_names(tmp_path: Path, name: str, content: bytes, expected: str) -> None:
    folder = tree(tmp_path / "a", a_py="")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(content)
    assert [str(finding) for finding in list_contents(folder).refused] == [name + expected]
    assert [str(finding) for finding in scan_folder(folder)] == [f"{name}: {expected.rpartition(': ')[2]}"]
    (folder / ".cloudtrainignore").write_text(f"!/{name}\n")
    assert name in own_names(folder)


@pytest.mark.parametrize(("name", "content"), HARMLESS)
def test_a_secret_name_with_harmless_content_is_included(tmp_path: Path, name: str, content: bytes) -> None:
    folder = tree(tmp_path / "a", a_py="")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(content)
    assert name in own_names(folder)
    assert scan_folder(folder) == []


def test_certificates_of_packages_are_included(tmp_path: Path) -> None:
    folder = tree(tmp_path / "a", a_py="")
    (folder / "cacert.pem").write_bytes(Path(certifi.where()).read_bytes())
    assert "cacert.pem" in own_names(folder)


def test_a_link_is_scanned_as_its_target(tmp_path: Path) -> None:
    folder = tree(tmp_path / "a", a_py="")
    (folder / "server.key").write_bytes(SEQUENCE + b"\x02\x01\x00\x02\x82")
    (folder / ".gitignore").write_text("server.key\n")
    (folder / "data.bin").symlink_to("server.key")
    assert [str(finding) for finding in list_contents(folder).refused] == ["data.bin: private key"]


def test_only_the_beginning_of_a_large_file_is_scanned(tmp_path: Path) -> None:
    folder = tree(tmp_path / "a", first=f"{ID}\n" + "x " * 3_000_000, last="x " * 3_000_000 + ID)
    contents = list_contents(folder)
    assert [str(finding) for finding in contents.refused] == ["first:1: AWS access key id"]
    digests = {entry.name: (entry.sha256, entry.size) for entry in contents.entries}
    for name in ("first", "last"):
        data = (folder / name).read_bytes()
        assert digests[name] == (hashlib.sha256(data).hexdigest(), len(data))


def test_example_environments_and_public_keys_are_included(tmp_path: Path) -> None:
    folder = tree(tmp_path / "a", a_py="")
    for name in (".env.example", ".env.sample", "id_rsa.pub", "credentials.py", "environment.yml"):
        (folder / name).write_text("x")
    assert len(own_names(folder)) == 6


def test_folders_of_credentials_are_refused(tmp_path: Path) -> None:
    folder = tree(tmp_path / "a", a_py="")
    (folder / ".aws").mkdir()
    (folder / ".aws" / "config").write_text("x")
    with pytest.raises(BundleError, match=r"\.aws/: AWS configuration"):
        collect(folder)
    (folder / ".cloudtrainignore").write_text("!.aws/\n")
    assert ".aws/config" in own_names(folder)


def test_all_secrets_are_reported_at_once(tmp_path: Path) -> None:
    folder = tree(tmp_path / "a", a_py=f"'{ID}'\n")
    for number in range(14):
        (folder / f"{number:02}.p12").write_text("x")
    with pytest.raises(BundleError) as caught:
        collect(folder)
    assert caught.value.message.startswith("15 files look like they hold secrets")
    assert "  00.p12: key store\n" in caught.value.message
    assert caught.value.message.endswith("and 5 more places")
    assert len(list_contents(folder).refused) == 15


def test_a_link_to_a_secret_is_a_secret(tmp_path: Path) -> None:
    folder = tree(tmp_path / "a", a_py="")
    (folder / ".env").write_text("x")
    (folder / ".gitignore").write_text(".env\n")
    (folder / "notes.txt").symlink_to(".env")
    with pytest.raises(BundleError, match=r"notes\.txt: environment file"):
        collect(folder)
    (folder / ".cloudtrainignore").write_text("!notes.txt\n")
    assert "notes.txt" in own_names(folder)


@pytest.mark.usefixtures("_remembers_at_once")
def test_a_secret_is_found_when_its_digest_is_cached(tmp_path: Path) -> None:
    folder = tree(tmp_path / "a", train_py=f"'{ID}'\n", data="")
    with (folder / "data").open("wb") as file:
        file.truncate(20_000_000)
    for _ in range(2):
        assert [str(finding) for finding in list_contents(folder, home=tmp_path / "home").refused] == [
            "train.py:1: AWS access key id"
        ]
    assert len(list((tmp_path / "home" / "bundles").glob("digests-*.json"))) == 1


def test_secrets_below_a_data_folder_are_reported(tmp_path: Path) -> None:
    data = tree(tmp_path / "data", a_csv=ID, sub__b_csv="", sub__deep__id_rsa="x")
    for name in (".env", ".aws/config", ".aws/credentials", "sub/deep/x.key", "sub/cert.pem"):
        (data / name).parent.mkdir(exist_ok=True)
        (data / name).write_text(PRIVATE if name.endswith(".key") else CERTIFICATE)
    (data / "sub" / "deep" / "id_rsa").write_text("x")
    os.mkfifo(data / "pipe.pem")
    (data / "loop").symlink_to(".")
    (data / "table.csv").symlink_to(".env")
    assert [str(finding) for finding in scan_folder(data)] == [
        ".aws/: AWS configuration and credentials",
        ".env: environment file",
        "sub/deep/id_rsa: private key",
        "sub/deep/x.key: private key",
        "table.csv: environment file",
    ]
    assert [finding.name for finding in scan_folder(data, most=2)] == [".aws/", ".env"]
    assert [str(finding) for finding in scan_folder(data / ".aws")] == [".aws/: AWS configuration and credentials"]
    assert [str(finding) for finding in scan_folder(data / ".env")] == [".env: environment file"]
    assert scan_folder(tmp_path / "nowhere") == []


def test_a_large_data_folder_is_scanned_only_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloudtrain.secrets.scanner.MAX_FILES", 100)
    for number in range(4):
        folder = tree(tmp_path / str(number), **{f"file{n:02}": "" for n in range(40)})
        (folder / "id_rsa").touch()
    names = [finding.name for finding in scan_folder(tmp_path)]
    assert names[:2] == ["0/id_rsa", "1/id_rsa"]
    assert "3/id_rsa" not in names


def test_folders_of_data_are_scanned_without_reading_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of data may hold millions of files."""
    for number in range(2_000):
        folder = tmp_path / str(number // 1000)
        folder.mkdir(exist_ok=True)
        (folder / f"{number}.png").touch()

    def refuse(*_: object, **__: object) -> NoReturn:
        raise AssertionError("a file was opened")

    for opener in ("builtins.open", "io.open", "os.open"):
        monkeypatch.setattr(opener, refuse)
    assert scan_folder(tmp_path) == []


# ---------------------------------------------------------------- digests that are remembered


@pytest.fixture
def _remembers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remember files that have just been written, too, which saves the tests from waiting."""
    monkeypatch.setattr("cloudtrain.bundle.digests._TICK_NS", -(10**15))


def large(folder: Path) -> Path:
    tree(folder, a_py="1")
    for number in range(1200):
        (folder / f"{number}.txt").write_text(str(number))
    return folder


@pytest.mark.usefixtures("_remembers_at_once")
def test_an_unchanged_tree_is_not_read_again(tmp_path: Path) -> None:
    folder = large(tmp_path / "a")
    first = collect(folder, home=tmp_path / "home")
    name = next(iter((tmp_path / "home" / "bundles").glob("digests-*.json")))
    remembered = json.loads(name.read_text())
    remembered["files"]["7.txt"][1][0] = "0" * 64
    name.write_text(json.dumps(remembered))
    second = collect(folder, home=tmp_path / "home")
    assert {e.name for e in first.entries} == {e.name for e in second.entries}
    assert next(e.sha256 for e in second.entries if e.name == "7.txt") == "0" * 64
    # Packing hashes each file again, so a wrong cache entry is found and dropped.
    with pytest.raises(BundleError, match=r"7\.txt changed while the bundle was written"):
        write_bundle(second, tmp_path / "home" / "bundles")
    assert collect(folder, home=tmp_path / "home").info == first.info


@pytest.mark.usefixtures("_remembers_at_once")
def test_any_change_invalidates_the_digest_cache(tmp_path: Path) -> None:
    folder = large(tmp_path / "a")
    before = collect(folder, home=tmp_path / "home").info.digest
    status = (folder / "7.txt").stat()
    (folder / "7.txt").write_text("x")
    os.utime(folder / "7.txt", ns=(status.st_atime_ns, status.st_mtime_ns))
    assert collect(folder, home=tmp_path / "home").info.digest != before


def test_a_file_changed_just_now_is_not_cached(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("1")
    digests = Digests(tmp_path, None)
    digests.of("f", str(tmp_path / "f"), (tmp_path / "f").stat())
    assert digests._kept == {}  # noqa: SLF001 (it is the promise)


@pytest.mark.usefixtures("_remembers_at_once")
@pytest.mark.parametrize("content", ["", "[]", '{"version": 1}', '{"version": null, "files": 3}', "\0"])
def test_a_damaged_digest_cache_is_no_error(tmp_path: Path, content: str) -> None:
    folder = large(tmp_path / "a")
    before = collect(folder, home=tmp_path / "home").info
    next(iter((tmp_path / "home" / "bundles").glob("digests-*.json"))).write_text(content)
    assert collect(folder, home=tmp_path / "home").info == before


def test_a_small_tree_writes_no_digest_cache(tmp_path: Path) -> None:
    collect(tree(tmp_path / "a", a_py=""), home=tmp_path / "none")
    assert not (tmp_path / "none").exists()


# ---------------------------------------------------------------- the archive


def test_archive_bytes_are_pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloudtrain.bundle.contents._runtime_files", lambda: iter(()))
    folder = tree(tmp_path / "a", a_py="print(1)\n", sub__b="x" * 200_000)
    (folder / ("long" * 40)).write_text("a name that is too long for ustar")
    (folder / "größe.py").write_text("")
    (folder / "run").write_text("#!")
    (folder / "run").chmod(0o755)
    archive = write_bundle(collect(folder), tmp_path / "out").path
    assert (
        hashlib.sha256(archive.read_bytes()).hexdigest()
        == "5738fb36cf23cb4b1c118a747fa4f41082d9ceefe80da3eec92423078f364906"
    )


def test_other_tools_can_read_the_archive(tmp_path: Path) -> None:
    contents = collect(tree(tmp_path / "a", a_py="print(1)\n", sub__b="x" * 200_000, empty=""))
    archive = write_bundle(contents, tmp_path / "out").path
    subprocess.run(["gzip", "-t", archive], check=True)
    (tmp_path / "unpacked").mkdir()
    subprocess.run(["tar", "xzf", archive, "-C", tmp_path / "unpacked"], check=True)
    assert (tmp_path / "unpacked" / "sub" / "b").read_text() == "x" * 200_000
    for entry in contents.entries:
        assert hashlib.sha256((tmp_path / "unpacked" / entry.name).read_bytes()).hexdigest() == entry.sha256
    assert len(gzip.decompress(archive.read_bytes())) % tarfile.RECORDSIZE == 0


def test_memory_does_not_grow_with_file_sizes(tmp_path: Path) -> None:
    folder = tree(tmp_path / "a", a_py="")
    with (folder / "table").open("wb") as file:
        file.truncate(64_000_000)
    tracemalloc.start()
    write_bundle(collect(folder), tmp_path / "out")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16_000_000


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    folder = tree(tmp_path / "a", a_py="1" * 1000, b_py="2" * 2000)
    calls: list[tuple[int, int]] = []
    contents = collect(folder, progress=lambda done, total: calls.append((done, total)))
    write_bundle(contents, tmp_path / "out", progress=lambda done, total: calls.append((done, total)))
    assert len(calls) == 2 * len(contents.entries) - 1
    assert calls[-1] == (contents.info.bytes, contents.info.bytes)
    assert all(done <= total for done, total in calls)


def test_a_complete_archive_is_not_rewritten(tmp_path: Path) -> None:
    contents = collect(tree(tmp_path / "a", a_py="1"))
    first = write_bundle(contents, tmp_path / "out").path.stat()
    again = write_bundle(contents, tmp_path / "out").path.stat()
    assert (again.st_ino, again.st_mtime_ns) == (first.st_ino, first.st_mtime_ns)


@pytest.mark.parametrize("size", [0, 4, 65_000, -1], ids=["empty", "stub", "cut", "one byte less"])
@pytest.mark.parametrize("code", ["1", "1" * 200_000], ids=["small", "large"])
def test_a_truncated_archive_is_rewritten(tmp_path: Path, code: str, size: int) -> None:
    contents = collect(tree(tmp_path / "a", a_py=code))
    archive = write_bundle(contents, tmp_path / "out").path
    complete = archive.read_bytes()
    archive.write_bytes(complete[:size])
    assert write_bundle(contents, tmp_path / "out").path.read_bytes() == complete


def test_an_archive_of_zeros_is_rewritten(tmp_path: Path) -> None:
    """What a file system leaves of a file whose content was not on the disk yet when the machine lost its power."""
    contents = collect(tree(tmp_path / "a", a_py="1"))
    archive = write_bundle(contents, tmp_path / "out").path
    complete = archive.read_bytes()
    archive.write_bytes(bytes(len(complete)))
    assert write_bundle(contents, tmp_path / "out").path.read_bytes() == complete


@pytest.mark.parametrize("change", ["longer", "shorter", "other", "gone"])
def test_a_file_that_changes_during_packing_is_reported(tmp_path: Path, change: str) -> None:
    folder = tree(tmp_path / "a", a_py="12345")
    contents = collect(folder)
    if change == "gone":
        (folder / "a.py").unlink()
    else:
        (folder / "a.py").write_text({"longer": "123456", "shorter": "1", "other": "54321"}[change])
    with pytest.raises(BundleError, match=r"a\.py changed while the bundle was written"):
        write_bundle(contents, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").rglob("*") if path.is_file()] == []


# ---------------------------------------------------------------- odd trees


def test_the_folder_of_local_runs_is_always_excluded(tmp_path: Path) -> None:
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


def test_broken_links_are_reported(tmp_path: Path) -> None:
    folder = tree(tmp_path / "a", a_py="1", sub__b_py="")
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
        assert "sub/b.py" in own_names(folder)
        (folder / name).unlink()
    (folder / "data").symlink_to(tmp_path)
    with pytest.raises(BundleError, match="outside of the code folder"):
        collect(folder)


@pytest.mark.parametrize("name", ["runs [1]", "sp*ce", ".hidden", "runs"])
def test_the_home_is_excluded_with_any_name_and_behind_links(tmp_path: Path, name: str) -> None:
    folder = tree(tmp_path / "a", a_py="")
    (folder / name / "runs").mkdir(parents=True)
    (folder / name / "runs" / "state.json").write_text("x")
    (tmp_path / "link").symlink_to(folder)
    for root in (folder, tmp_path / "link"):
        for home in (folder / name, tmp_path / "link" / name):
            names = [entry.name for entry in collect(root, home=home).entries if "cloudtrain_" not in entry.name]
            assert names == ["a.py"]
    (folder / "shortcut").symlink_to(name)
    assert collect(folder, home=folder / name).exclusion_reason("shortcut/x") == "runs of cloudtrain"


def test_a_home_that_is_the_code_folder(tmp_path: Path) -> None:
    folder = tree(tmp_path / "a", a_py="", runs__x="", bundles__y="")
    assert [e.name for e in collect(folder, home=folder).entries if "cloudtrain_" not in e.name] == ["a.py"]


@pytest.fixture
def nest(tmp_path: Path) -> Iterator[Callable[[str, int], Path]]:
    """Make a tree that is deeper than Python's own functions can make or remove."""
    folder = tree(tmp_path / "a", a_py="")

    def make(name: str, depth: int) -> Path:
        here = os.open(folder, os.O_RDONLY)
        for _ in range(depth):
            os.mkdir(name, dir_fd=here)
            below = os.open(name, os.O_RDONLY, dir_fd=here)
            os.close(here)
            here = below
        os.close(os.open("deep.py", os.O_CREAT | os.O_WRONLY, dir_fd=here))
        os.close(here)
        return folder

    yield make
    subprocess.run(["rm", "-rf", folder], check=True)


def test_a_very_deep_tree_is_included(tmp_path: Path, nest: Callable[[str, int], Path]) -> None:
    contents = collect(nest("d", 1200))
    assert contents.entries[-1].name == "d/" * 1200 + "deep.py"
    with tarfile.open(write_bundle(contents, tmp_path / "out").path) as archive:
        assert contents.entries[-1].name in archive.getnames()


def test_a_tree_deeper_than_the_path_limit_is_refused(nest: Callable[[str, int], Path]) -> None:
    with pytest.raises(BundleError, match="cannot be read: File name too long"):
        collect(nest("d" * 100, 60))


def test_a_name_that_is_not_utf8_is_refused_and_printable(tmp_path: Path) -> None:
    folder = tree(tmp_path / "a", a_py="")
    (Path(os.fsdecode(os.fsencode(folder) + b"/caf\xe9.py"))).write_text("")
    with pytest.raises(BundleError, match="is not UTF-8") as caught:
        collect(folder)
    str(caught.value).encode()
    (folder / ".cloudtrainignore").write_text("caf*\n")
    assert own_names(folder) == [".cloudtrainignore", "a.py"]
    json.dumps(collect(folder).to_json()).encode()


def test_names_with_newlines_are_included_and_escaped(tmp_path: Path) -> None:
    folder = tree(tmp_path / "a", a_py="")
    (folder / "two\nlines").write_text("1")
    assert own_names(folder) == ["a.py", "two\nlines"]
    (folder / "two\nlines").rename(folder / "two\nlines.pt")
    assert collect(folder).left_out[0].name == "two\\nlines.pt"


@pytest.fixture
def _without_rights() -> Iterator[None]:
    """Give up root's right to read everything, where the tests run as root."""
    mine = os.geteuid()
    if mine == 0:
        os.seteuid(65534)
    yield
    os.seteuid(mine)


@pytest.mark.parametrize("name", ["sub", "a.py", ".gitignore"])
def test_unreadable_paths_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, name: str
) -> None:
    folder = tree(tmp_path / "a", a_py="", sub__b_py="")
    (folder / ".gitignore").write_text("x\n")
    monkeypatch.chdir(folder)  # the user nobody may not enter this folder by its absolute path
    Path(name).chmod(0)
    request.getfixturevalue("_without_rights")
    with pytest.raises(BundleError, match=f"{name}.* cannot be read: Permission denied"):
        collect(Path())


def test_a_missing_code_folder_is_reported(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="nowhere cannot be read: No such file"):
        collect(tmp_path / "nowhere")


def test_sockets_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tree(tmp_path / "a", a_py="")
    monkeypatch.chdir(folder)
    with socket.socket(socket.AF_UNIX) as place:
        place.bind("s")
        with pytest.raises(BundleError, match="s is neither file nor folder"):
            collect(folder)


def test_setup_py_at_the_root_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"has a setup\.py at its root"):
        collect(tree(tmp_path / "a", setup_py=""))


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    folder = tree(tmp_path / "a", setup_py="", a_py=f"'{ID}'", cloudtrain_runtime__x_py="", sub__b_py="")
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
        "\n  and 3 more such\n    replace it by a file",
        "\n2 files look like they hold secrets, which the bundle would include:\n",
        "\n  .env: environment file\n  a.py:1: AWS access key id",
    ]:
        assert part in message
    assert message.count("outside of the code folder") == 9
    assert "the line /.env excludes it" in caught.value.hint
    assert ID not in str(caught.value)


def test_a_single_problem_is_reported_with_the_secrets(tmp_path: Path) -> None:
    folder = tree(tmp_path / "a", setup_py="")
    (folder / ".env").write_text("x")
    with pytest.raises(
        BundleError, match=r"(?s)^1 problem in the code folder.*setup\.py.*1 file looks like.*\.env: environment"
    ):
        collect(folder)


def test_reserved_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="of its own"):
        collect(tree(tmp_path / "a", cloudtrain_runtime__x_py=""))


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    folder = tree(tmp_path / "a", a_py="")
    os.mkfifo(folder / "pipe")
    with pytest.raises(BundleError, match="neither file nor folder"):
        collect(folder)


def test_a_too_large_bundle_lists_its_largest_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloudtrain.bundle.contents.MAX_BYTES", 200_000)
    folder = tree(tmp_path / "a", a_py="", weights="x" * 200_000)
    with pytest.raises(BundleError) as caught:
        collect(folder)
    assert "weights" in caught.value.hint
