"""Listing and filtering of runs, and the times that `--since` and `--until` accept."""

from __future__ import annotations

import heapq
import itertools
import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from support.jobs import Cli, Terminal, command

import cloudtrain
from cloudtrain.backends.container.state_file import RecordedState, read_state, write_state
from cloudtrain.backends.local import backend
from cloudtrain.backends.local.backend import LocalBackend
from cloudtrain.console.runs import print_runs
from cloudtrain.runs.run_filter import RunFilter
from cloudtrain.runs.status import State, Status
from cloudtrain.support.run_id import make_run_id, submitted_at
from cloudtrain.support.units import parse_moment

NOW = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)
ENDS = (State.SUCCEEDED, State.FAILED, State.STOPPED)


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    """Write runs, each an hour older than the one before; return their ids."""
    found = []
    for index in range(30):
        moment = NOW - timedelta(hours=index)
        run = make_run_id("gpt" if index % 2 else "digits", moment, f"{index:06x}")
        folder = tmp_path / "runs-home" / "runs" / run
        folder.mkdir(parents=True)
        write_state(
            folder,
            RecordedState(ENDS[index % 3], started=moment, ended=moment + timedelta(minutes=5)),
        )
        tags = [{"Key": "team", "Value": "vision" if index % 5 == 0 else "language"}]
        (folder / "request.json").write_text(json.dumps({"Tags": tags}))
        found.append(run)
    (tmp_path / "runs-home" / "runs" / "notes").mkdir()
    (tmp_path / "runs-home" / "runs" / found[0].replace("digits", "empty")).mkdir()
    return found


def listed(wanted: RunFilter) -> list[str]:
    return [status.run for status in cloudtrain.list_runs(wanted)]


def test_filters_select_local_runs(runs: list[str]) -> None:
    assert listed(RunFilter()) == runs
    assert listed(RunFilter(name="gpt")) == runs[1::2]
    assert listed(RunFilter(states=frozenset({State.FAILED}))) == runs[1::3]
    assert listed(RunFilter(states=frozenset({State.FAILED, State.STOPPED}))) == [
        run for index, run in enumerate(runs) if index % 3
    ]
    assert listed(RunFilter(states=frozenset({State.RUNNING}))) == []
    assert listed(RunFilter(tags={"team": "vision"})) == runs[::5]
    assert listed(RunFilter(tags={"team": "vision", "other": "x"})) == []
    assert listed(RunFilter(since=NOW - timedelta(hours=3), until=NOW)) == runs[1:4]
    assert listed(RunFilter("digits", frozenset({State.SUCCEEDED}), {"team": "vision"})) == [
        runs[0]
    ]


def test_states_are_read_lazily(runs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def read_and_record(folder: Path) -> RecordedState:
        read.append(folder.name)
        return read_state(folder)

    monkeypatch.setattr(backend, "read_state", read_and_record)
    assert len(list(itertools.islice(cloudtrain.Client().list_runs(RunFilter(name="gpt")), 3))) == 3
    assert read == runs[1:6:2]


def test_a_running_state_without_supervisor_becomes_failed(runs: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "runs-home" / "runs" / runs[4]
    write_state(folder, RecordedState(State.RUNNING, supervisor=2**22 + 1))
    assert listed(RunFilter(states=frozenset({State.RUNNING}))) == []
    assert runs[4] in listed(RunFilter(states=frozenset({State.FAILED})))
    assert (
        LocalBackend(tmp_path / "runs-home")
        .status(runs[4])
        .reason.startswith("the supervisor of this run")
    )


def test_list_shows_a_page_and_the_next_command(runs: list[str], cli: Cli) -> None:
    done = cli("list", "-n", "4", "--name", "gpt", "--since", "2026-11-01")
    lines = done.out.splitlines()
    assert [line.split() for line in lines[:2]] == [
        ["run", "state", "submitted", "(UTC)", "took"],
        [f"local:{runs[1]}", "FAILED", "2026-11-20", "11:00", "5m"],
    ]
    assert len({line.index("2026-11") for line in lines[1:]}) == 1
    assert done.err.strip().endswith("list --name gpt --since 2026-11-01 -n 8")
    assert "more" not in cli("list", "-n", "15", "--name", "gpt").err
    assert (
        len(
            cli("list", "-n", "7", "--state", "failed", "--state", "stopped", "--json").json["runs"]
        )
        == 7
    )
    assert cli("list", "--tag", "team=audio").out == "no run matches\n"


def test_runs_of_all_backends_are_sorted_by_time() -> None:
    def status(backend: str, hours: int) -> Status:
        moment = NOW - timedelta(hours=hours)
        return Status(make_run_id("x", moment, "000000"), backend, State.SUCCEEDED, created=moment)

    from cloudtrain.runs.run_filter import submission_time

    here, there = (
        [status("local", each) for each in (0, 2, 4)],
        [status("sagemaker", each) for each in (1, 3)],
    )
    merged = heapq.merge(here, there, key=submission_time, reverse=True)
    assert [each.backend for each in merged] == ["local", "sagemaker"] * 2 + ["local"]


def test_columns_show_what_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    started = NOW + timedelta(minutes=10)
    known = {"created": NOW, "started": started, "ended": started + timedelta(hours=2)}
    run = make_run_id("x", NOW, "000000")
    first = Status(
        run,
        "sagemaker",
        State.FAILED,
        "no such column\ntraceback",
        **known,
        instance_type="ml.g5.xlarge",
    )
    second = Status(run, "sagemaker", State.SUCCEEDED)
    print_runs([first, second], is_filtered=False)
    header, one, other = capsys.readouterr().out.splitlines()
    assert header.split() == ["run", "state", "submitted", "(UTC)", "took", "on"]
    assert one.split()[1:6] == ["FAILED", "2026-11-20", "12:00", "2h", "ml.g5.xlarge"]
    assert one.endswith("no such column")
    assert other.split() == [f"sagemaker:{run}", "SUCCEEDED"]


def test_states_have_colours_on_a_terminal_only(runs: list[str], cli: Cli, tmp_path: Path) -> None:
    event = {
        "event": "evaluation",
        "split": "validation",
        "step": 1,
        "samples": 1,
        "time": 1.0,
        "loss": 0.25,
    }
    (tmp_path / "runs-home" / "runs" / runs[0] / "events.jsonl").write_text(
        json.dumps(event) + "\n"
    )

    def on_terminal(**environ: str) -> str:
        environment = {**os.environ, "TERM": "xterm-256color", **environ}
        terminal = Terminal([str(command()), "list", "-n", "3"], environment, columns=160)
        assert terminal.end() == 0
        return terminal.written.decode()

    shown = on_terminal()
    for state, colour in (("SUCCEEDED", "32"), ("FAILED", "1;31"), ("STOPPED", "33")):
        assert f"\x1b[{colour}m{state}" in shown
    assert "loss 0.25" in shown
    for plain in (on_terminal(NO_COLOR="1"), on_terminal(TERM="dumb"), cli("list").out):
        assert "FAILED" in plain
        assert "\x1b[1;31m" not in plain


@pytest.mark.parametrize(
    ("text", "start", "end"),
    [
        ("2d", NOW - timedelta(days=2), NOW - timedelta(days=2)),
        ("90m", NOW - timedelta(minutes=90), NOW - timedelta(minutes=90)),
        ("2026-11-01", datetime(2026, 11, 1, tzinfo=UTC), datetime(2026, 11, 2, tzinfo=UTC)),
        ("2026-11-01T00:00", datetime(2026, 11, 1, tzinfo=UTC), datetime(2026, 11, 1, tzinfo=UTC)),
        (
            "2026-11-01T10:15+01:00",
            datetime(2026, 11, 1, 9, 15, tzinfo=UTC),
            datetime(2026, 11, 1, 9, 15, tzinfo=UTC),
        ),
    ],
)
def test_times_are_parsed(text: str, start: datetime, end: datetime) -> None:
    assert parse_moment(text, NOW) == start
    assert parse_moment(text, NOW, is_end=True) == end


@pytest.mark.parametrize("text", ["", "yesterday", "2", "2026-11-31", "11/01/2026", "999999999d"])
def test_malformed_times_are_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="expected a duration such as 2d or a date"):
        parse_moment(text, NOW)


def test_a_run_id_contains_its_time() -> None:
    assert submitted_at(make_run_id("a-b", NOW, "000000")) == NOW
    assert submitted_at("a-b-261340-101500-000000") is None
    assert not RunFilter(since=NOW).accepts_run("a-b-261340-101500-000000")
