"""Where a benchmark writes its result; a wrong place ends it before it measures."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from measure import BEGIN, END, Benchmark, Session

BENCHMARK = Benchmark("/x/speed.py", "About it.", peers="nothing", goal="none", mechanism="it ran")


def write_to(place: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run a benchmark with --write; return how often it has measured."""
    measured = 0

    def measure(session: Session) -> Iterator[str]:
        nonlocal measured
        measured += 1
        session.checks += 1
        yield "a figure"

    monkeypatch.setattr(sys, "argv", ["speed.py", "--write", str(place)])
    with pytest.raises(SystemExit) as ended:
        BENCHMARK.main(measure)
    assert measured == (ended.value.code == 0)
    return measured


def test_a_folder_gets_a_page_of_the_benchmarks_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        assert write_to(tmp_path, monkeypatch) == 1
    text = (tmp_path / "speed.md").read_text()
    assert text.count("a figure") == 1
    assert text.startswith("# speed\n\nAbout it.\n")


def test_the_text_around_the_figures_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nbehind\n")
    assert write_to(page, monkeypatch) == 1
    assert page.read_text().startswith(f"before\n{BEGIN}\na figure")
    assert page.read_text().endswith(f"{END}\nbehind\n")
    page.write_text("mine")
    assert write_to(page, monkeypatch) == 0
    assert page.read_text() == "mine"
    assert write_to(tmp_path / "none" / "page.md", monkeypatch) == 0
