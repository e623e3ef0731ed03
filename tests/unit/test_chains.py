"""A run of several attempts, which is one run for every command."""

from __future__ import annotations

import fcntl
import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from support.jobs import Cli
from support.recorded_chains import KILLED, Tried, attempt_id, write_chain
from support.recorded_runs import step_events, write_run

from cloudtrain.client.client import Client
from cloudtrain.console.runs import print_runs
from cloudtrain.runs.history import read_history
from cloudtrain.runs.run_filter import RunFilter
from cloudtrain.runs.status import State

OTHER = "gpt-261120-111500-ffffff"
TRIED = (
    Tried(0, 40, first=0, last=35, saved=30),
    Tried(50, 70, first=30, last=45, saved=None),
    Tried(100, 180, first=30, last=100, saved=100),
)
"""The second one has saved nothing. Between them, the run has waited for 10 and 30 seconds."""
TOTAL_SECONDS = 140
LIMIT = "2 attempts have been made (limits.recover.attempts)"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "runs-home"


@pytest.fixture
def chain(home: Path) -> str:
    return write_chain(home, TRIED)


@pytest.fixture
def failed(home: Path) -> str:
    reason = f"{KILLED}; {LIMIT}"
    return write_chain(home, TRIED[:2], state=State.FAILED, reason=reason)


def attempts(chain: str) -> list[str]:
    return [chain, attempt_id(2), attempt_id(3)]


# Lists


def test_a_chain_is_one_row_of_the_list(cli: Cli, chain: str, home: Path) -> None:
    write_run(home, OTHER, step_events(3))
    header, *rows = cli("list").out.splitlines()
    assert [row.split()[0] for row in rows] == [f"local:{OTHER}", f"local:{chain}"]
    assert "attempts" in header
    assert "SUCCEEDED" in rows[1]
    column = header.index("attempts")
    assert rows[1][column:].split()[0] == "3"
    assert rows[0][column : column + len("attempts")].strip() == ""


@pytest.mark.parametrize(("columns", "is_shown"), [(120, True), (40, False)])
def test_a_terminal_shows_attempts_where_there_is_room(
    chain: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    columns: int,
    *,
    is_shown: bool,
) -> None:
    runs = [*Client().list_runs()]
    monkeypatch.setattr("cloudtrain.console.tables.terminal_width", lambda: columns)
    print_runs(runs, is_filtered=False)
    header, row = capsys.readouterr().out.splitlines()
    assert chain[-6:] in row
    assert ("ATTEMPTS" in header) is is_shown


def test_json_lists_a_chain_with_its_attempts(cli: Cli, chain: str) -> None:
    (found,) = cli("list", "--json").json["runs"]
    assert found["run"] == chain
    assert [each["run"] for each in found["attempts"]] == attempts(chain)
    assert [*found][-1] == "attempts"


def test_filters_see_the_state_of_the_chain(chain: str, home: Path) -> None:
    def listed(**wanted: Any) -> list[str]:
        return [each.run for each in Client().list_runs(RunFilter(**wanted))]

    assert listed(states={State.FAILED}) == []
    assert listed(states={State.SUCCEEDED}) == [chain]
    assert listed(name=attempt_id(2)) == []
    assert listed(since=datetime.fromisoformat("2026-11-20T12:00:00+00:00")) == []
    assert listed(tags={"team": "vision"}) == []
    tagged = write_chain(home, TRIED[:1], name="gpt", job={"tags": {"team": "vision"}})
    assert listed(tags={"team": "vision"}) == [tagged]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("run", ".."),
        ("run", 3),
        ("state", "LOST"),
        ("started", "now"),
        ("started", None),
        ("ended", [1]),
        ("settled_usd", "much"),
        ("checkpoint", "30"),
        ("reason", {}),
        (None, "{"),
        (None, "[]"),
        (None, '{"version": 99}'),
    ],
)
def test_a_damaged_record_hides_no_run(
    cli: Cli, chain: str, home: Path, name: str | None, value: Any
) -> None:
    file = home / "chains" / chain / "chain.json"
    content = json.loads(file.read_text())
    content["attempts"][1][name] = value
    file.write_text(value if name is None else json.dumps(content))
    assert len(cli("list", "--json").json["runs"]) == len(TRIED)
    done = cli("rm", chain, "--yes")
    assert (done.code, len(list((home / "runs").iterdir()))) == (2, len(TRIED))
    assert str(file) in done.err


# Names


def test_a_jobs_name_means_the_chain_and_not_an_attempt(chain: str) -> None:
    assert Client().get_run("digits").id == chain
    assert Client().get_run("latest").id == chain
    assert Client().get_run("local:digits").id == chain


def test_an_attempts_own_id_is_the_attempt(cli: Cli, chain: str) -> None:
    second = attempt_id(2)
    status = cli("status", second, "--json").json
    assert (status["run"], status["state"], status["attempts"]) == (second, "FAILED", [])
    assert Client().get_run(second[-6:]).id == second


# Status


def test_status_has_each_attempt(cli: Cli, chain: str) -> None:
    status = cli("status", chain, "--json").json
    assert (status["run"], status["state"], status["last_step"]) == (chain, "SUCCEEDED", 100)
    assert [
        (each["attempt"], each["run"], each["state"], each["reason"], each["checkpoint_step"])
        for each in status["attempts"]
    ] == [
        (1, chain, "INTERRUPTED", KILLED, 30),
        (2, attempt_id(2), "INTERRUPTED", KILLED, None),
        (3, attempt_id(3), "SUCCEEDED", "", 100),
    ]
    assert [_seconds(each) for each in status["attempts"]] == [40, 20, 80]
    assert all(each["cost_usd"] == 0 for each in status["attempts"])


def test_status_has_a_line_for_each_attempt(cli: Cli, chain: str) -> None:
    lines = cli("status", chain).out.splitlines()
    shown = [" ".join(line.split()) for line in lines if line.startswith("attempt ")]
    assert shown == [
        f"attempt 1 40s, saved step 30: {KILLED}",
        f"attempt 2 20s: {KILLED}",
        "attempt 3 1m20s, saved step 100",
    ]


def test_a_chain_of_an_ended_attempt_waits(cli: Cli, home: Path) -> None:
    chain = write_chain(home, TRIED[:1], state=None)
    status = cli("status", chain, "--json").json
    assert (status["state"], status["ended"]) == ("QUEUED", None)
    assert KILLED in status["reason"]
    assert f"cloudtrain recover {chain}" in status["reason"]
    with (home / "chains" / chain / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        watched = cli("status", chain, "--json").json["reason"]
    assert watched.startswith("attempt 1 has ended")
    assert [each["state"] for each in status["attempts"]] == ["INTERRUPTED"]


# Log, metrics, explanation


def test_logs_and_metrics_are_those_of_all_attempts(cli: Cli, chain: str) -> None:
    log = cli("logs", chain).out
    places = [log.index(f"this is attempt {number}") for number in (1, 2, 3)]
    assert places == sorted(places)
    losses = read_history(Client().get_run(chain)).metrics["train/loss"]
    assert [each.step for each in losses] == list(range(1, 101))


def test_explain_says_why_no_other_attempt_began(cli: Cli, failed: str) -> None:
    found = cli("explain", failed, "--json").json
    assert found["message"] == KILLED
    assert found["class"] == "killed"
    assert found["action"].startswith(f"Attempt 2 was the last one: {LIMIT}.")


def test_explain_of_an_inside_cause_names_the_field(cli: Cli, home: Path) -> None:
    chain = write_chain(home, TRIED[:1], state=State.FAILED, reason=KILLED)
    action = cli("explain", chain, "--json").json["action"]
    why = "only the causes of limits.recover.on begin another one"
    assert action.startswith(f"Attempt 1 was the last one: {why}")


@pytest.mark.parametrize("state", [State.SUCCEEDED, State.FAILED, None])
def test_an_attempt_begins_no_chain_of_its_own(cli: Cli, home: Path, state: State | None) -> None:
    chain = write_chain(home, TRIED[:2], state=state, reason="" if state is None else KILLED)
    done = cli("recover", attempt_id(2))
    assert done.code == 2
    assert f"is a later attempt of {chain}" in done.err
    assert f"cloudtrain recover {chain}" in done.err
    assert not (home / "chains" / attempt_id(2)).exists()


def test_a_damaged_record_of_another_run_keeps_nothing(cli: Cli, chain: str, home: Path) -> None:
    other = write_chain(home, TRIED[:1], state=State.FAILED, reason=KILLED, name="other")
    (home / "chains" / other / "chain.json").write_text("{")
    done = cli("rm", chain, "--yes")
    assert done.code == 0, done.err
    assert not (home / "chains" / chain).exists()


# Costs


def test_a_ledger_has_a_bar_for_each_attempt(cli: Cli, chain: str) -> None:
    found = cli("costs", chain, "--json").json
    seconds = {each["kind"]: each["seconds"] for each in found["entries"]}
    assert found["seconds"] == sum(
        _seconds(each) for each in cli("status", chain, "--json").json["attempts"]
    )
    assert found["seconds"] == TOTAL_SECONDS
    assert seconds["waiting"] == 10 + 30
    # The first step of an attempt is its start, and what no event shows counts as what surrounds it.
    assert seconds["repeated"] == (40 - 30) + (20 - 1)
    assert seconds["training"] == 29 + 69
    assert sum(seconds.values()) == TOTAL_SECONDS + 40
    assert found["interruptions"] == 2
    assert len(found["attempts"]) == len(TRIED)


def test_a_sum_counts_each_attempt_once(cli: Cli, chain: str, home: Path) -> None:
    write_run(home, OTHER, step_events(3))
    assert "2 local runs, 32m20s" in cli("costs").out
    assert cli("costs", "--json").json["total"]["runs"] == 2


# Deletion


def test_rm_deletes_all_attempts_and_the_record(cli: Cli, chain: str, home: Path) -> None:
    write_run(home, OTHER, step_events(3))
    size = sum(
        each.stat().st_size
        for run in attempts(chain)
        for each in (home / "runs" / run).rglob("*")
        if each.is_file()
    )
    done = cli("rm", chain, "--yes", "--json")
    assert done.json["removed"] == [{"run": f"local:{chain}", "bytes": size}]
    assert [each.name for each in (home / "runs").iterdir()] == [OTHER]
    assert list((home / "chains").iterdir()) == []


def test_rm_refuses_an_active_chain_and_one_attempt(cli: Cli, chain: str, home: Path) -> None:
    done = cli("rm", attempt_id(3), "--yes")
    assert done.code == 2
    assert f"is an attempt of {chain}" in done.err
    assert f"cloudtrain rm {chain}" in done.err
    active = write_chain(home, TRIED[:1], state=None, name="gpt")
    done = cli("rm", active, "--yes")
    assert done.code == 2
    assert f"cloudtrain stop local:{active}" in done.err
    assert len(list((home / "runs").iterdir())) == len(TRIED) + 1


def test_rm_keeps_an_attempt_that_a_run_continues(cli: Cli, chain: str, home: Path) -> None:
    folder = write_run(home, OTHER, step_events(3))
    plan = json.loads((folder / "plan.json").read_text())
    plan["config"] = {"checkpoint": {"resume": attempt_id(2)}}
    (folder / "plan.json").write_text(json.dumps(plan))
    done = cli("rm", chain, "--yes")
    assert done.code == 2
    assert f"cloudtrain rm {chain} {OTHER}" in done.err


# Results


def test_results_are_those_of_the_attempt_that_saved_last(home: Path) -> None:
    chain = write_chain(home, TRIED[:2], state=State.FAILED, reason=KILLED)
    run = Client().get_run(chain)
    assert run.plan_document()["run"] == chain
    folder = Client().checkpoint_folder(chain)
    assert folder.run == chain
    both = write_chain(home, TRIED, name="gpt")
    assert Client().get_run(both).plan_document()["run"] == attempt_id(3, "gpt")
    assert Client().checkpoint_folder(both).run == attempt_id(3, "gpt")


def _seconds(attempt: dict[str, Any]) -> float:
    ended, started = (datetime.fromisoformat(attempt[name]) for name in ("ended", "started"))
    return (ended - started).total_seconds()
