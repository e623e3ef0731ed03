"""Chains in the sandbox: no capacity, a dead instance, a time limit, and a controller that continues on another machine."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.aws_proxies import serve_proxy
from support.chains import STEPS, Chains, controllers_of, kill_controller, stored_chain, weights_in
from support.jobs import Cli, until
from support.local_runs import LOG_EVERY_STEP
from support.sandboxes import Served

import cloudtrain
from cloudtrain.features.recovery import service
from cloudtrain.runs.attempt_chain import AttemptState
from cloudtrain.runs.status import State
from cloudtrain_runtime.contract.constants import REHEARSAL_HOLD_VARIABLE

pytestmark = [pytest.mark.processes, pytest.mark.aws]

COST_USD = 30.0
LIMITS = ("--set", "limits.runtime=10m", "--set", f"limits.recover.cost={COST_USD} USD")


@pytest.fixture
def chains(cli: Cli, tmp_path: Path) -> Iterator[Chains]:
    """Return chains in a sandbox of their own."""
    yield Chains(cli, tmp_path)
    cli("sandbox", "--stop")


def sandbox_of(tmp_path: Path) -> Served:
    """Return the sandbox that a submit has started."""
    home = tmp_path / "runs-home" / "sandbox"
    info: Any = json.loads((home / "sandbox.json").read_text())
    return Served(process=None, info=info, home=home)  # type: ignore[arg-type]


def weights_of(run: str, folder: Path) -> str:
    cloudtrain.download(run, folder, what="model", unpack=True)
    return weights_in(folder / "model")


@pytest.mark.promise
def test_a_chain_survives_the_faults_of_an_account(
    chains: Chains, cli: Cli, tmp_path: Path
) -> None:
    straight = chains.submit("--follow", backend="sandbox")
    served = sandbox_of(tmp_path)
    served.set_faults(capacity_error_after_seconds=0.2)
    run = chains.submit("--recover", *LIMITS, *LOG_EVERY_STEP, backend="sandbox", holds=[5, 9])
    assert served.end_of(run)["FailureReason"].startswith("CapacityError")
    served.set_faults()
    chains.wait_at(5)
    stored = stored_chain(run)
    second = stored.read().newest.run
    until(lambda: served.keys(f"cloudtrain/{second}/checkpoints/step-00000004/manifest.json"))
    kill_controller(run)
    served.set_faults(dead_instance={"host": "algo-1", "step": 4})
    assert served.end_of(second)["FailureReason"].startswith("InternalServerError")
    served.set_faults()
    chains.release(5)
    # As on another machine.
    shutil.rmtree(stored.folder)
    again = cli("recover", f"sandbox:{run}")
    assert again.code == 0, again.err
    chains.wait_at(9)
    shown = cli("status", f"sandbox:{run}").out
    assert "InternalServerError" in shown
    chains.release(9)
    found = chains.end_of(f"sandbox:{run}")
    assert (found["state"], found["last_step"]) == ("SUCCEEDED", STEPS), found
    chain = stored_chain(run).read()
    causes = [each.cause for each in chain.attempts]
    assert causes[0] == "capacity"
    assert causes[-2:] == ["infrastructure", ""]
    assert 0 < found["cost_usd"] <= COST_USD
    assert served.keys(f"cloudtrain/chains/{run}/chain.json")
    weights = weights_of(f"sandbox:{run}", tmp_path / "chain")
    assert weights == weights_of(f"sandbox:{straight}", tmp_path / "straight")


def test_a_chain_continues_after_a_time_limit(chains: Chains, cli: Cli, tmp_path: Path) -> None:
    """The training waits after a step until the limit of a minute."""
    hold = ("--set", f"code.env.{REHEARSAL_HOLD_VARIABLE}=9", "--set", "limits.runtime=1m")
    straight = chains.submit("--follow", backend="sandbox")
    run = chains.submit("--recover", *hold, backend="sandbox")
    found = chains.end_of(f"sandbox:{run}")
    assert found["state"] == "SUCCEEDED", found
    first, *_, last = stored_chain(run).read().attempts
    assert first.cause == "time_limit"
    assert last.cause == ""
    weights = weights_of(f"sandbox:{run}", tmp_path / "chain")
    assert weights == weights_of(f"sandbox:{straight}", tmp_path / "straight")
    logs = cli("logs", f"sandbox:{run}").out
    assert logs.index("stopped after step 9") < logs.index("resumed from step 9")


def test_a_submit_without_capacity_begins_a_chain(
    sandbox: Served, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[str] = []
    is_full = True

    def refuse(called: str, request: Any, status: int, response: Any) -> tuple[int, Any]:
        if called != "CreateTrainingJob" or not is_full:
            return status, response
        refused.append(request["TrainingJobName"])
        return 400, {"__type": "ResourceLimitExceeded", "message": "the limit is 0 instances"}

    def unsent(operation: str, request: Any) -> Any:
        is_refused = operation == "CreateTrainingJob" and is_full
        return {**request, "TrainingJobName": "not valid"} if is_refused else request

    with serve_proxy(sandbox.port, refuse, unsent) as endpoint:
        environ = {**sandbox.environment, "CLOUDTRAIN_TRANSPORT": "boto3"}
        for name, value in environ.items():
            is_endpoint = value == sandbox.info["endpoint"]
            monkeypatch.setenv(name, endpoint if is_endpoint else value)
        chains = Chains(lambda *words: cli(*words, environ=dict(os.environ)), tmp_path)
        options = ("--skip-check", "--recover", "--set", "limits.runtime=10m")
        run = chains.submit(*options, backend="sagemaker")
        stored = stored_chain(run)
        waiting = chains.cli("status", run, "--json").json
        assert waiting["state"] == "QUEUED", waiting
        # The controller may be about to try again at this moment.
        until(
            lambda: "the limit is 0 instances" in chains.cli("status", run, "--json").json["reason"]
        )
        # The same command attaches to it.
        assert chains.submit(*options, backend="sagemaker") == run
        without = chains.submit(*options[:1], *options[2:], backend="sagemaker")
        assert without == run
        kill_controller(run)
        shown = chains.cli("status", "chained").out
        assert f"no controller of this machine continues it: cloudtrain recover {run}" in shown
        assert set(refused) == {run}
        is_full = False
        service.control(stored, report=lambda _: None)
        chain = stored.read()
        assert (chain.state, len(chain.attempts)) == (State.SUCCEEDED, 1), chain
        assert chain.newest.state is AttemptState.ENDED
        assert chains.end_of(run)["last_step"] == STEPS


def test_a_submit_that_died_before_its_chain_is_harmless(
    sandbox: Served, cli: Cli, tmp_path: Path
) -> None:
    """The run was sent, and the chain was not recorded: the same command attaches, and begins the chain."""
    environ = {**os.environ, **sandbox.environment, "CLOUDTRAIN_TRANSPORT": "boto3"}
    chains = Chains(lambda *words: cli(*words, environ=environ), tmp_path)
    options = ("--skip-check", "--set", "limits.runtime=10m")
    run = chains.submit(*options, backend="sagemaker", holds=[3])
    chains.wait_at(3)
    again = chains.submit(*options, "--recover", backend="sagemaker", holds=[3])
    assert again == run
    until(lambda: controllers_of(run))
    chains.release(3)
    assert chains.end_of(run)["state"] == "SUCCEEDED"
    assert [each.run for each in stored_chain(run).read().attempts] == [run]
