"""The architecture page and CONTRIBUTING name paths and packages that exist."""

import ast
import re

import pytest
from support.jobs import REPOSITORY

pytestmark = pytest.mark.promise

PAGES = {
    name: (REPOSITORY / name).read_text(encoding="utf-8")
    for name in ("docs/architecture.md", "docs/architecture.svg", "CONTRIBUTING.md")
}
PACKAGES = ("sdk/cloudtrain", "entrypoints/cloudtrain_runtime")


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_paths_in_backticks_exist(page: str) -> None:
    paths = re.findall(
        r"`((?:sdk|entrypoints|tests|infra|docs|examples|benchmarks)/[\w./-]*)`", PAGES[page]
    )
    assert len(paths) > 10
    assert [path for path in paths if not (REPOSITORY / path).exists()] == []


PURE = ("planning", "job", "catalog", "secrets", "failure_rules")
CALLS = {"subprocess", "socket", "http", "urllib.request", "boto3", "botocore", "multiprocessing"}
WRITES = {"write_text", "write_bytes", "write_atomically", "mkdir", "touch", "unlink", "rename"}


@pytest.mark.parametrize("package", PURE)
def test_packages_below_the_line_call_and_write_nothing(package: str) -> None:
    found = set()
    for path in (REPOSITORY / "sdk" / "cloudtrain" / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            if isinstance(node, ast.Call):
                function = getattr(node.func, "attr", getattr(node.func, "id", ""))
                names = [function] if function in WRITES else []
            found |= {
                (path.name, name)
                for name in names
                if name in WRITES or any(f"{name}.".startswith(f"{each}.") for each in CALLS)
            }
    assert found <= {("service_limits.py", "mkdir"), ("service_limits.py", "write_atomically")}


def test_failure_rules_open_no_file() -> None:
    names = set()
    for path in (REPOSITORY / "sdk/cloudtrain/failure_rules").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names |= {getattr(node, "module", None), *(alias.name for alias in node.names)}
            if isinstance(node, ast.Call):
                names.add(getattr(node.func, "attr", getattr(node.func, "id", "")))
    reads = {"open", "os", "io", "Path", "read_text", "read_bytes", "glob", "stat", "exists"}
    assert {"re", "Explanation", "search"} <= names
    assert names & (reads | {"logs", "facts", "time"}) == set()


def test_picture_shows_every_package() -> None:
    shown = set(re.findall(r">([\w ]+)</text>", PAGES["docs/architecture.svg"]))
    for package in PACKAGES:
        entries = {
            path.stem for path in (REPOSITORY / package).iterdir() if path.suffix in ("", ".py")
        }
        public = {name for name in entries if not name.startswith("_")}
        assert public - shown == set()


def test_table_of_changes_covers_every_package() -> None:
    table = PAGES["docs/architecture.md"].partition("## To change X, see Y")[2]
    assert len(re.findall(r"^\| [^|]+ \| `", table, flags=re.MULTILINE)) > 20
    for package in PACKAGES:
        for path in (REPOSITORY / package).iterdir():
            if path.is_dir() and not path.name.startswith("_"):
                assert f"{package}/{path.name}" in table, path
