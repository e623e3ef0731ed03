"""Terminal output is free of escape sequences, whatever a job, a name or a file contains."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.jobs import Cli, Terminal, command

from cloudtrain.backends.container.state_file import RecordedState, write_state
from cloudtrain.console.terminal import (
    FilteredStream,
    filtered_streams,
    strip_escapes,
    strip_unsafe_escapes,
    unfiltered,
    visible_part,
)
from cloudtrain.runs.status import State

RUN = "odd-261120-101500-1a2b3c"
ATTACKS = (
    "\x1b]0;owned\x07", "\x1b]52;c;b3duZWQ=\x1b\\", "\x1b]8;;http://owned\x1b\\", "\x1b[2J", "\x1b[1;1H", "\x1b[6n",
    "\x1b[?1049h", "\x1bc", "\x1bP$qm\x1b\\", "\x1b_owned\x1b\\", "\x9b2J", "\x9d0;owned\x9c", "\x07", "\x08", "\x1b(0",
    "\x00", "\x1b", "\x1b[", "\x1b]", "\x0e", "\x85", "\x1b[31;5",
)  # fmt: skip
ATTACK = "".join(f"{attack}-" for attack in ATTACKS)
LEGAL = re.compile(rb"\x1b\[[0-9;:]*m")
PARTS = st.sampled_from(
    [*ATTACKS, "\x1b[31m", "\x1b[0m", "\n", "\t", "a", "é", "[", "m", ";", "1", "\ud800"]
)


def is_harmless(written: bytes) -> bool:
    return re.search(rb"[\x00-\x08\x0b-\x1f]|\xc2[\x80-\x9f]", LEGAL.sub(b"", written)) is None


@given(st.lists(PARTS).map("".join))
def test_filtered_text_contains_no_escape_sequence(text: str) -> None:
    for cleaned in (strip_unsafe_escapes(text), strip_escapes(text)):
        assert is_harmless(cleaned.encode("utf-8", "surrogatepass"))
    assert "\x1b" not in strip_escapes(text)
    assert (
        strip_unsafe_escapes(text).count("\n")
        == strip_escapes(text).count("\n")
        == text.count("\n")
    )
    for line in strip_unsafe_escapes(text).split("\n"):
        codes = re.findall(r"\x1b\[[0-9;:]*m", line)
        assert not codes or codes[-1] in ("\x1b[m", "\x1b[0m")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain\ttext é", "plain\ttext é"),
        ("\x1b[31mred\x1b[0m", "\x1b[31mred\x1b[0m"),
        ("\x1b[1;31mred\nnext", "\x1b[1;31mred\x1b[0m\nnext"),
        ("a\x1b]0;title\x07b", "ab"),
        ("a\x1b]0;no end", "a0;no end"),
        ("a\x1b[2Jb\x9b1;1Hc", "abc"),
        ("a\x08\x07\x00b", "ab"),
        ("\u202egnp.exe \u2066a\u200bb\ufeff", r"\u202egnp.exe \u2066a\u200bb\ufeff"),
        (
            "\u0645\u06cc\u200c\u062e, \U0001f468\u200d\U0001f469",
            "\u0645\u06cc\u200c\u062e, \U0001f468\u200d\U0001f469",
        ),
    ],
)
def test_colours_are_kept_and_other_sequences_removed(text: str, expected: str) -> None:
    assert strip_unsafe_escapes(text) == expected


def test_a_progress_bar_is_reduced_to_its_last_state() -> None:
    assert visible_part(" 10%\r 50%\r100%\r") == "100%"


def test_streams_are_filtered_and_restored() -> None:
    before = sys.stdout
    with filtered_streams():
        assert isinstance(sys.stdout, FilteredStream)
        assert unfiltered(sys.stdout) is before
        with filtered_streams():
            assert unfiltered(sys.stdout) is before
    assert sys.stdout is before


def test_characters_outside_the_encoding_are_escaped() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), "ascii", write_through=True)
    FilteredStream(stream).write("é\udc80")
    assert stream.buffer.getvalue() == b"\\xe9\\udc80"  # type: ignore[attr-defined]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a failed run in which every text contains escape sequences."""
    folder = tmp_path / "runs-home" / "runs" / RUN
    (folder / "logs").mkdir(parents=True)
    reason = f"rank 1 on algo-1 failed: ValueError: [red]markup[/red] {ATTACK}"
    write_state(
        folder, RecordedState(State.FAILED, reason, artifacts={f"model{ATTACK}": f"/x{ATTACK}"})
    )
    events = [
        {"event": "started", "device": ATTACK, "world_size": 2, "resumed_from": ATTACK, "step": 1},
        {"event": "evaluation", "split": ATTACK, ATTACK: 1.0, "step": 1},
        {"event": "bandwidth", "gbps": 1.0, "warning": ATTACK},
        {"event": "checkpoint", "step": 1, "uri": ATTACK, "time": 1.0},
        {
            "event": "checkpoint_missed",
            "step": 2,
            "reason": ATTACK,
            "detail": ATTACK,
            "alarm": True,
        },
        {
            "event": "failed",
            "host": "algo-1",
            "rank": 1,
            "message": f"rank 1 failed: ValueError: [red]markup[/red] {ATTACK}",
        },
    ]
    (folder / "events.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in events))
    lines = [
        *(f"CLOUDTRAIN {json.dumps(event)}" for event in events),
        ATTACK,
        "Traceback (most recent call last):",
        f'  File "train{ATTACK}.py", line 1, in <module>',
        f"ValueError: [red]markup[/red] {ATTACK}",
        " 10%\r 50%\r100%",
    ]
    (folder / "logs" / "algo-1.log").write_bytes(
        "\n".join([*lines, ""]).encode() + b"\xff not UTF-8\r\n"
    )
    plan = {"run": RUN, "checkpoint": {"uri": ATTACK}, "cluster": {"world_size": 2}}
    (folder / "plan.json").write_text(json.dumps(plan))
    return folder


def written_by(folder: Path, *words: str) -> bytes:
    environ = {**os.environ, "CLOUDTRAIN_HOME": str(folder.parents[1])}
    done = subprocess.run(
        [command(), *words],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    assert b"this is a bug" not in done.stdout, done.stdout
    return done.stdout


@pytest.mark.parametrize("verb", ["logs", "status", "explain", "follow", "list"])
def test_no_command_prints_an_escape_sequence(folder: Path, verb: str) -> None:
    written = written_by(folder, verb, *(() if verb == "list" else (RUN,)))
    assert is_harmless(written), written
    assert b"[red]markup[/red]" in written
    if verb == "logs":
        assert b"100%\n" in written
        assert b"50%" not in written


def test_plans_and_errors_print_no_escape_sequence(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    text = json.dumps(ATTACK)
    for code in (f"{{script: train.py, args: [{text}]}}", f"{{script: {text}}}"):
        (tmp_path / "job.yaml").write_text(
            f"name: odd\ncode: {code}\ncluster: {{instance_type: ml.m5.large}}\n"
        )
        assert is_harmless(written_by(folder, "plan", "--local", str(tmp_path / "job.yaml")))
    for words in (
        ["status", f"x{ATTACK}".replace("\0", "")],
        ["plan", f"/{ATTACK}".replace("\0", "")],
    ):
        assert is_harmless(written_by(folder, *words))


def test_follow_on_a_terminal_prints_no_escape_sequence(folder: Path) -> None:
    environ = {**os.environ, "CLOUDTRAIN_HOME": str(folder.parents[1]), "TERM": "xterm-256color"}
    terminal = Terminal([str(command()), "follow", RUN], environ)
    assert terminal.end() == 4
    assert b"\x1b]" not in terminal.written
    for attack in (
        b"\x1b[2J",
        b"\x1b[1;1H",
        b"\x1b[6n",
        b"\x1b[?1049h",
        b"\x1bc",
        b"\x1bP",
        b"\x07",
        b"\xc2\x9b",
    ):
        assert attack not in terminal.written
    assert "[red]markup[/red]" in terminal.text


def test_raw_logs_are_the_bytes_of_the_file(folder: Path) -> None:
    lines = (folder / "logs" / "algo-1.log").read_bytes().split(b"\n")[:-1]
    assert written_by(folder, "logs", RUN, "--raw") == b"".join(
        b"algo-1  " + line + b"\n" for line in lines
    )


def test_json_contains_the_original_text(folder: Path, cli: Cli) -> None:
    assert ATTACK in cli("status", RUN, "--json").json["reason"]
    assert ATTACK in [line["text"] for line in cli("logs", RUN, "--json").json["lines"]]
