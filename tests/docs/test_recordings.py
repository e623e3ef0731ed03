"""The recorder of terminals: what pyte reads, and the picture that is made of it."""

import importlib.util
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.jobs import REPOSITORY

pytest.importorskip("pyte")

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def recorder() -> ModuleType:
    path = REPOSITORY / "docs" / "pictures" / "record_terminal.py"
    spec = importlib.util.spec_from_file_location("record_terminal", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["record_terminal"] = module
    spec.loader.exec_module(module)
    return module


def texts(picture: str) -> list[str]:
    root = ET.fromstring(picture)  # noqa: S314, written by this project
    return ["".join(element.itertext()) for element in root.iter(f"{SVG}text")]


def test_a_program_sees_a_terminal_of_80_by_24(recorder: ModuleType, tmp_path: Path) -> None:
    program = "import os, sys; print(*os.get_terminal_size(), sys.stdout.isatty())"
    chunks = list(recorder.record([sys.executable, "-c", program], tmp_path, tmp_path))
    assert "".join(chunk.text for chunk in chunks).split() == ["80", "24", "True"]


def test_a_program_that_fails_gives_no_picture(recorder: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="exit code 3"):
        list(recorder.record([sys.executable, "-c", "raise SystemExit(3)"], tmp_path, tmp_path))


def test_long_pauses_are_shortened(recorder: ModuleType) -> None:
    chunks = [recorder.Chunk(0.0, "one\r\n"), recorder.Chunk(60.0, "two\r\n")]
    picture = recorder.play("command", chunks)
    assert max(picture.seconds[:-1]) <= recorder.LONGEST_PAUSE
    assert picture.seconds[-1] == recorder.LAST_SCREEN_SECONDS


def test_a_line_that_changes_is_one_row(recorder: ModuleType) -> None:
    chunks = [recorder.Chunk(0.0, "50 %"), recorder.Chunk(1.0, "\r100 %\r\n")]
    last = recorder.play("command", chunks).frames[-1]
    shown = [piece.text for row in last for piece in row]
    assert "100 %" in shown
    assert "50 %" not in shown


@pytest.mark.parametrize(
    ("codes", "field", "expected"),
    [
        ("1", "bold", True),
        ("2", "dim", True),
        ("2;22", "dim", False),
        ("31", "colour", "#ff7b72"),
        ("38;5;2", "dim", False),
        ("38;2;2;2;2", "colour", "#020202"),
        ("4", "underline", True),
    ],
)
def test_styles_are_kept(recorder: ModuleType, codes: str, field: str, expected: Any) -> None:
    last = recorder.play("c", [recorder.Chunk(0.0, f"\x1b[{codes}mword\x1b[0m\r\n")]).frames[-1]
    (piece,) = [piece for row in last for piece in row if piece.text == "word"]
    assert getattr(piece.style, field) == expected


def test_the_picture_is_xml_with_each_row_once(recorder: ModuleType) -> None:
    chunks = [
        recorder.Chunk(0.0, "<a & b>\r\n"),
        recorder.Chunk(1.0, "\x1b[7m x \x1b[0m\r\n"),
    ]
    picture = recorder.draw(recorder.play("c", chunks), 'runs "c"')
    assert texts(picture).count("<a & b>") == 1
    assert " x " in texts(picture)
