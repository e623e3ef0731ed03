"""Tables on a terminal and in a pipe, and the formats of ages and numbers."""

import os
import re
import sys

import pytest
from support.jobs import REPOSITORY, Terminal
from support.printed_tables import TABLES

from cloudtrain.console.cells import cell_count, cut_text
from cloudtrain.console.facts import fitting_lines, print_facts, print_sentence
from cloudtrain.console.tables import Cell, Column, run_cell, table_lines
from cloudtrain.support.units import format_age, format_number

REFERENCE = "local:digits-261125-223727-71810a"
COLUMNS = (
    Column("run", title="ID"),
    Column("job", least=6),
    Column("state"),
    Column("submitted (UTC)", only="pipe"),
    Column("age", only="terminal", drop=2),
    Column("GPUs", is_number=True, drop=1),
    Column("", least=10),
)
ROWS = (
    (
        run_cell(REFERENCE),
        "digits",
        "SUCCEEDED",
        "2026-11-25 22:37",
        "2m ago",
        "8",
        "accuracy 0.98",
    ),
    (run_cell(REFERENCE), "a" * 40, "FAILED", "2026-11-25 22:37", "3h ago", "128", "b" * 70),
)


def test_a_pipe_gets_all_columns_and_full_texts() -> None:
    header, first, second = table_lines(COLUMNS, ROWS, None)
    assert header.split() == ["run", "job", "state", "submitted", "(UTC)", "GPUs"]
    assert first.startswith(f"{REFERENCE}  digits  ")
    assert second.endswith(f"FAILED     2026-11-25 22:37  128   {'b' * 70}")


def test_a_wide_terminal_gets_its_columns_in_full() -> None:
    header, first, second = table_lines(COLUMNS, ROWS, 200)
    assert header == f"ID      JOB{' ' * 37}  STATE      AGE     GPUS"
    assert first == f"71810a  digits{' ' * 34}  SUCCEEDED  2m ago     8  accuracy 0.98"
    assert second.endswith("b" * 70)


def test_columns_are_dropped_in_their_order_before_texts_vanish() -> None:
    def header(width: int) -> list[str]:
        return table_lines(COLUMNS, ROWS, width)[0].split()

    assert header(52) == ["ID", "JOB", "STATE", "AGE", "GPUS"]
    assert header(50) == ["ID", "JOB", "STATE", "AGE"]
    assert header(42) == ["ID", "JOB", "STATE"]


@pytest.mark.parametrize("width", range(37, 140))
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    lines = table_lines(COLUMNS, ROWS, width)
    assert max(map(cell_count, lines)) <= width
    assert lines[1].startswith("71810a  ")


def test_a_text_is_cut_at_its_end() -> None:
    lines = table_lines(COLUMNS, ROWS, 80)
    assert lines[2].endswith("b…")
    assert "a…  FAILED" in lines[2]


def test_wide_characters_are_counted_by_cells() -> None:
    assert cell_count("東京") == 4
    assert cell_count("e\u0301") == 1
    assert cut_text("東京都庁", 5) == "東京…"
    lines = table_lines((Column("a"), Column("b")), [("東京", "1"), ("x", "2")], 80)
    assert lines == ["A     B", "東京  1", "x     2"]


def test_control_characters_do_not_move_columns() -> None:
    rows = [("one\ntwo\x1b[2J", "1")]
    assert table_lines((Column("a"), Column("b")), rows, 80) == ["A        B", "one two  1"]


def test_empty_columns_are_left_out() -> None:
    columns = (Column("a"), Column("b"))
    assert table_lines(columns, [("1", "")], None) == ["a", "1"]
    assert table_lines(columns, [("1", "")], 80) == ["A", "1"]
    assert table_lines(columns, [], 80) == []


def test_colours_and_dim_columns_do_not_change_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloudtrain.console.tables.coloured", lambda text, code: f"<{code}:{text}>")
    rows = [(Cell("full", shown="f"), "FAILED"), ("other", "x")]
    columns = (Column("a", is_dim=True), Column("b"))
    lines = table_lines(columns, rows, 80, colours={"FAILED": "31"})
    assert lines == ["<1:A>      <1:B>", "<2:f>      <31:FAILED>", "<2:other>  x"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-3, "now"),
        (0.4, "now"),
        (5, "5s ago"),
        (125, "2m ago"),
        (3 * 3600, "3h ago"),
        (5.9 * 86400, "5d ago"),
    ],
)
def test_ages(seconds: float, text: str) -> None:
    assert format_age(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2696.4, "2,696"),
        (0.068241, "0.06824"),
        (1.2344e-5, "1.234e-05"),
        (999.96, "1,000"),
        (-1234567.8, "-1,234,568"),
        (5e12, "5e+12"),
        (0.0, "0"),
        (12, "12"),
        (float("inf"), "inf"),
        (float("nan"), "nan"),
    ],
)
def test_numbers_have_four_significant_digits(value: float, text: str) -> None:
    assert format_number(value) == text


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("name", TABLES)
def test_every_table_fits_a_terminal(name: str, columns: int) -> None:
    environment = {
        **os.environ,
        "TERM": "xterm-256color",
        "PYTHONPATH": str(REPOSITORY / "tests"),
    }
    program = [sys.executable, "-m", "support.printed_tables", name]
    terminal = Terminal(program, environment, columns)
    assert terminal.end() == 0, terminal.text
    plain = re.sub(r"\x1b\[[0-9;]*m", "", terminal.written.decode())
    lines = [line.rstrip() for line in plain.splitlines()]
    assert len(lines) > 1
    assert [line for line in lines if cell_count(line) > columns] == []


def test_sentences_and_fields_break_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloudtrain.console.facts.terminal_width", lambda: 20)
    lines: list[str] = []
    print_sentence("  some words and /a/path/that/is/longer/than/that more", write=lines.append)
    assert lines == ["  some words and", "    /a/path/that/is/longer/than/that", "    more"]
    lines.clear()
    print_facts([("name", "some words that go on"), ("of", "it")], write=lines.append)
    assert lines == ["name  some words", "      that go on", "of    it"]


def test_a_pipe_gets_sentences_and_fields_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloudtrain.console.facts.terminal_width", lambda: None)
    lines: list[str] = []
    print_sentence("some words " * 20, write=lines.append)
    print_facts([("name", "some words " * 20)], write=lines.append)
    assert len(lines) == 2


def test_what_was_drawn_for_the_width_is_not_broken_again() -> None:
    drawn = f"\x1b[32m✓\x1b[0m starts  {'x' * 30} {'y' * 35}"
    assert fitting_lines(drawn, 80) == [drawn]
    assert fitting_lines("one two three four", 14) == ["one two", "  three four"]
