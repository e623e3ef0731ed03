"""The documentation site builds without a warning, and loads nothing from other servers."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.jobs import REPOSITORY

pytest.importorskip("sphinx")
pytest.importorskip("furo")
pytest.importorskip("myst_parser")


def build(docs: Path, site: Path) -> subprocess.CompletedProcess[str]:
    options = ["--quiet", "--nitpicky", "--fail-on-warning", "--keep-going", "--builder", "html"]
    command = [sys.executable, "-W", "ignore", "-m", "sphinx", *options, str(docs), str(site)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=REPOSITORY)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(REPOSITORY / "docs", folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_is_built(site: Path) -> None:
    docs = REPOSITORY / "docs"
    pages = [path.relative_to(docs) for path in docs.rglob("*.md") if "_build" not in path.parts]
    assert [page for page in pages if not (site / page.with_suffix(".html")).is_file()] == []


def test_site_loads_nothing_from_other_servers(site: Path) -> None:
    loads = re.compile(
        r"<(?:script|img|iframe|source|link)\b[^>]*(?:src|href)=[\"'](?:https?:)?//[^\"']*"
    )
    assert [
        found for page in site.rglob("*.html") for found in loads.findall(page.read_text())
    ] == []
    styles = re.compile(r"(?:@import|url\()\s*[\"']?(?:https?:)?//[^\"')]*")
    assert [
        found for page in site.rglob("*.css") for found in styles.findall(page.read_text())
    ] == []


@pytest.mark.parametrize(
    ("link", "message"),
    [
        ("missing.md", "missing.md"),
        ("concepts.md#missing", "missing"),
        ("../missing.py", "missing.py"),
    ],
)
def test_broken_link_fails_the_build(tmp_path: Path, link: str, message: str) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    shutil.copy(REPOSITORY / "docs" / "conf.py", docs)
    (docs / "concepts.md").write_text("# Concepts\n")
    (docs / "index.md").write_text(f"# Index\n\n[link]({link})\n\n```{{toctree}}\nconcepts\n```\n")
    done = build(docs, tmp_path / "site")
    assert done.returncode != 0
    assert message in done.stderr
