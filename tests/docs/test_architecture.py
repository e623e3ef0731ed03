"""The architecture page and CONTRIBUTING name paths and packages that exist."""

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


def test_names_after_paths_are_defined_there() -> None:
    found = re.findall(r"`([\w/]+\.py)` \(`(\w+)`\)", PAGES["docs/architecture.md"])
    assert len(found) > 2
    for path, name in found:
        assert re.search(
            rf"^(class|def) {name}\b", (REPOSITORY / path).read_text(encoding="utf-8"), re.MULTILINE
        ), name


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
