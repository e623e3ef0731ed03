"""Chains of local runs, with real controllers: ranks, hosts, supervisors and controllers are killed."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from support.chains import (
    STEPS,
    Chains,
    controllers_of,
    host_of,
    kill,
    kill_controller,
    stored_chain,
    supervisor_of,
    weights_in,
)
from support.jobs import Cli, processes_of, until

import cloudtrain
from cloudtrain.backends.local import backend as local
from cloudtrain.features.recovery import service
from cloudtrain.features.recovery.stored_chain import StoredChain
from cloudtrain.runs.attempt_chain import AttemptState, Chain
from cloudtrain.runs.status import State

pytestmark = pytest.mark.processes

_uninterrupted: list[str] = []


@pytest.fixture
def chains(cli: Cli, tmp_path: Path) -> Chains:
    """Return the chains of a test."""
    return Chains(cli, tmp_path)


@pytest.fixture
def weights(chains: Chains) -> str:
    """Return the weights of an uninterrupted run, which the tests of this module share."""
    if not _uninterrupted:
        run = chains.submit("--follow")
        found = chains.end_of(run)
        assert found["last_step"] == STEPS
        _uninterrupted.append(weights_in(Path(found["artifacts"]["model_folder"])))
    return _uninterrupted[0]


@pytest.mark.promise
def test_a_chain_survives_every_kill(chains: Chains, cli: Cli, weights: str) -> None:
    run = chains.submit(holds=[3, 7, 11, 15])
    stored = stored_chain(run)
    kill(chains.wait_at(3, stored))
    chains.release(3)
    chains.wait_at(7, stored)
    kill(supervisor_of(stored.read().newest.run))
    chains.release(7)
    chains.wait_at(11, stored)
    # A second controller has nothing to do.
    before = stored.read()
    service.control(stored, report=pytest.fail)
    assert stored.read() == before
    # Nothing continues the chain until a command does.
    abandoned = f"nothing continues it when this attempt ends: cloudtrain recover {run}"
    assert abandoned not in cli("status", run, "--json").json["warnings"]
    kill_controller(run)
    assert abandoned in cli("status", run, "--json").json["warnings"]
    kill(host_of(before.newest.run))
    chains.release(11)
    waiting = until(lambda: _waits(cli, run))
    assert waiting["reason"].startswith(
        f"no controller of this machine continues it: cloudtrain recover {run}"
    )
    assert cli("recover", run).code == 0
    chains.wait_at(15, stored)
    kill_controller(run)
    chains.release(15)
    assert cli("recover", run).code == 0
    found = chains.end_of(run)
    assert (found["state"], found["last_step"]) == ("SUCCEEDED", STEPS)
    assert weights_in(Path(found["artifacts"]["model_folder"])) == weights
    ended = stored.read()
    assert [each.cause for each in ended.attempts] == [
        "infrastructure",
        "interruption",
        "infrastructure",
        "",
    ]
    assert all(processes_of(each.run) == [] for each in ended.attempts)
    refused = cli("recover", run)
    assert refused.code == 2
    assert "has succeeded after 4 attempts, so nothing is left to train" in refused.err


def _waits(cli: Cli, run: str) -> dict[str, str] | None:
    found: dict[str, str] = cli("status", run, "--json").json
    return found if found["state"] == "QUEUED" else None


def test_a_controller_may_die_at_each_record(
    chains: Chains, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends before and after each record of a state, once."""
    run = chains.submit("--detach", kills=[3, 7])
    died, write = set[tuple[str, int, str]](), StoredChain.write

    def die_once(when: str, chain: Chain) -> None:
        point = (when, len(chain.attempts), f"{chain.newest.state}{chain.state}")
        if point not in died:
            died.add(point)
            raise InterruptedError(point)

    def die_beside_write(stored: StoredChain, chain: Chain) -> None:
        die_once("before", chain)
        write(stored, chain)
        die_once("after", chain)

    client = service.Client()
    stored = service.begin_with_run(client, client.get_run(run))
    monkeypatch.setattr(StoredChain, "write", die_beside_write)
    while stored.read().state is None:
        with contextlib.suppress(InterruptedError):
            service.control(stored, report=lambda _: None)
        planned = stored.read().newest
        if planned.state is AttemptState.PLANNED:
            # The submit had begun, too.
            (stored.home / "runs" / planned.run).mkdir(exist_ok=True)
    found = chains.end_of(run)
    assert stored.read().state is State.SUCCEEDED
    assert weights_in(Path(found["artifacts"]["model_folder"])) == weights
    # The plan and the run of attempts 2 and 3, and the end.
    assert len(died) == 2 * (2 * 2 + 1)
    runs = {each.run for each in stored.read().attempts}
    started = {each.parent.name for each in (stored.home / "runs").glob("*/state.json")}
    assert len(runs) == 3
    assert runs <= started
    # Besides, there is the run with which the tests compare.
    assert len(started - runs) <= 1


def test_a_supervisor_may_die_while_it_starts(
    chains: Chains, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In place of the second supervisor, a process is started that ends at once."""
    run = chains.submit("--follow", kills=[3])
    start_background = local.start_background
    started: list[str] = []

    def start(name: str, module: list[str], *arguments: Any, **options: Any) -> Any:
        started.append(module[0])
        chosen = ["no_such_module"] if len(started) == 1 else module
        return start_background(name, chosen, *arguments, **options)

    monkeypatch.setattr(local, "start_background", start)
    client = service.Client()
    stored = service.begin_with_run(client, client.get_run(run))
    service.control(stored, report=lambda _: None)
    chain = stored.read()
    assert chain.state is State.SUCCEEDED, chain.reason
    assert [each.reason for each in chain.attempts][1] == "the local backend did not start"
    assert [each.cause for each in chain.attempts] == ["infrastructure", "infrastructure", ""]
    found = chains.end_of(run)
    assert weights_in(Path(found["artifacts"]["model_folder"])) == weights


def test_a_stopped_chain_begins_no_attempt(chains: Chains, cli: Cli) -> None:
    run = chains.submit(holds=[3, 7])
    stored = stored_chain(run)
    kill(chains.wait_at(3, stored))
    chains.release(3)
    chains.wait_at(7, stored)
    later = stored.read().newest.run
    named = cli("recover", later)
    assert named.code == 2
    assert f"is a later attempt of {run}" in named.err
    cloudtrain.get_run(run).stop()
    chains.release(7)
    until(lambda: stored.read().state)
    assert stored.read().state is State.STOPPED
    assert len(stored.read().attempts) == 2
    assert cli("status", run, "--json").json["state"] == "STOPPED"
    until(lambda: not controllers_of(run))


def test_a_failure_of_user_code_ends_a_chain(chains: Chains, cli: Cli) -> None:
    run = chains.submit(kills=[3], fails=[5])
    found = chains.end_of(run)
    assert (found["state"], found["exit_code"]) == ("FAILED", 4)
    assert "broken on purpose" in found["reason"]
    chain = stored_chain(run).read()
    assert [each.cause for each in chain.attempts] == ["infrastructure", ""]
    refused = cli("recover", run)
    assert refused.code == 2
    assert "is FAILED after 2 attempts" in refused.err
    assert "broken on purpose" in refused.err
    # A run without a chain.
    other = chains.submit("--follow", fails=[1])
    refused = cli("recover", other)
    assert refused.code == 2
    assert "another attempt would not help: an error in the job's code: ValueError" in refused.err
    assert StoredChain.find(other) is None


def test_attempts_without_a_checkpoint_end_a_chain(chains: Chains, cli: Cli) -> None:
    run = chains.submit(kills_always=[1])
    found = chains.end_of(run)
    assert found["state"] == "FAILED"
    assert found["reason"].endswith("; 3 attempts in a row ended without a new checkpoint")
    assert len(stored_chain(run).read().attempts) == 3
    refused = cli("recover", run)
    assert f"cloudtrain resume {run}" in refused.err


def test_a_run_that_was_killed_is_continued(chains: Chains, cli: Cli, weights: str) -> None:
    run = chains.submit("--follow", kills=[5])
    assert chains.end_of(run)["state"] == "FAILED"
    limits = ("--on", "capacity")
    refused = cli("recover", run, *limits)
    assert refused.code == 2
    assert "limits.recover.on does not have infrastructure" in refused.err
    done = cli("recover", run, "--attempts", "2", "--follow", "--json")
    assert done.code == 0, done.err
    assert done.json["state"] == "SUCCEEDED"
    assert weights_in(Path(done.json["artifacts"]["model_folder"])) == weights
    chain = stored_chain(run).read()
    assert (len(chain.attempts), chain.newest.state) == (2, AttemptState.ENDED)
