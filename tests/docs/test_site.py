"""The documentation site builds without a warning, loads nothing from other servers, and shows what it links to."""

import fcntl
import os
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
pytest.importorskip("sphinx_copybutton")
pytest.importorskip("sphinx_design")

MOST_ENTRIES = 8
"""Of a section of the sidebar."""
MOST_IN_SIDEBAR = 60


def build(docs: Path, site: Path) -> subprocess.CompletedProcess[str]:
    options = ["--quiet", "--nitpicky", "--fail-on-warning", "--keep-going", "--builder", "html"]
    command = [sys.executable, "-W", "ignore", "-m", "sphinx", *options, str(docs), str(site)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=REPOSITORY)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site once for all workers: each build takes a minute, and writes the generated pages into docs/."""
    base = tmp_path_factory.getbasetemp()
    together = base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base
    folder = together / "site"
    done = together / "site-is-built"
    with (together / "site.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            built = build(REPOSITORY / "docs", folder)
            assert built.returncode == 0, built.stderr
            done.touch()
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


def links(page: Path) -> list[str]:
    return re.findall(r"<a\b[^>]*href=\"([^\"#?]+)", page.read_text(encoding="utf-8"))


def test_no_link_downloads_a_file(site: Path) -> None:
    """A source, a README or a notebook has a page."""
    assert not (site / "_downloads").exists()
    local = {
        link
        for page in site.rglob("*.html")
        for link in links(page)
        if not re.match(r"[a-z]+:", link)
    }
    assert {link for link in local if not link.endswith((".html", ".png", "/", ".svg"))} == set()


def test_every_local_link_leads_to_a_page(site: Path) -> None:
    for page in site.rglob("*.html"):
        for link in links(page):
            assert re.match(r"[a-z]+:", link) or (page.parent / link).exists(), f"{page}: {link}"


def sidebar(site: Path) -> dict[str, list[str]]:
    """Return the entries of each section of the first page's sidebar, without those below an entry."""
    text = (site / "index.html").read_text(encoding="utf-8")
    parts = re.split(r"<p class=\"caption\"[^>]*><span class=\"caption-text\">", text)[1:]
    return {
        part.partition("<")[0]: re.findall(r"<li class=\"toctree-l1[^>]*><a[^>]*>([^<]+)", part)
        for part in parts
    }


def test_sidebar_has_few_entries_in_each_section(site: Path) -> None:
    sections = sidebar(site)
    assert list(sections) == [
        "Start",
        "Train",
        "Run on AWS",
        "Run on Slurm",
        "Look",
        "Tune",
        "Serve",
        "Reference",
        "Contributing",
    ]
    assert {name: len(found) for name, found in sections.items() if len(found) > MOST_ENTRIES} == {}
    assert all(sections.values())
    assert sum(map(len, sections.values())) <= MOST_IN_SIDEBAR


def test_decisions_are_one_entry(site: Path) -> None:
    assert [name for found in sidebar(site).values() for name in found if name[:2] == "0"] == []
    assert "Decisions" in sidebar(site)["Contributing"]


def test_prompts_are_not_copied(site: Path) -> None:
    script = (site / "_static" / "copybutton.js").read_text(encoding="utf-8")
    assert "copybuttonPromptText = '$ '" in script or "'$ '" in script


def test_an_example_shows_its_job_its_code_and_its_result(site: Path) -> None:
    page = re.sub(r"<[^>]+>", "", (site / "examples" / "digits.html").read_text(encoding="utf-8"))
    assert "instance_type: ml.p4d.24xlarge" in page
    assert "class Digits(Task" in page
    assert "Result: a test accuracy of" in page


def test_a_notebook_shows_its_cells(site: Path) -> None:
    page = (site / "examples" / "plan_and_train.html").read_text(encoding="utf-8")
    assert "Plan a job and train it here" in page
    assert "JobSpec.from_yaml" in re.sub(r"<[^>]+>", "", page)


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
    for name in ("conf.py", "repository_pages.py"):
        shutil.copy(REPOSITORY / "docs" / name, docs)
    (docs / "concepts.md").write_text("# Concepts\n")
    (docs / "index.md").write_text(f"# Index\n\n[link]({link})\n\n```{{toctree}}\nconcepts\n```\n")
    done = build(docs, tmp_path / "site")
    assert done.returncode != 0
    assert message in done.stderr
