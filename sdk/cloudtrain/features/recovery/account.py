"""Chains continued in the account itself, without a machine of a user: the handler of an AWS Lambda function.

The function is called when a training job has ended, and every few minutes for chains that wait for capacity. Each call
does for a chain what can be done at that moment, under the chain's lock in S3, and ends. infra/recovery.tf creates it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cloudtrain.aws.errors import aws_errors
from cloudtrain.aws.s3_objects import list_objects, put_object
from cloudtrain.client.account_chains import AccountChains
from cloudtrain.client.client import Client
from cloudtrain.controllers.process import print_line
from cloudtrain.controllers.shared_folder import LOCK_OBJECT, LockedError
from cloudtrain.errors import CloudtrainError
from cloudtrain.features.recovery.service import open_controller
from cloudtrain.features.recovery.shared_chain import account_chains, adopt
from cloudtrain.runs.attempt_chain import CHAIN_FILE
from cloudtrain.support.backend_facts import DEFAULT_BACKEND
from cloudtrain.support.run_id import is_run_id

_ENDED_OBJECT = "ended"
"""Beside the record of a chain that has ended: the listing shows it, so that the record is not read again."""
_FINAL = ("Completed", "Failed", "Stopped")
_LEAST_SECONDS = 60.0
"""Time that a step may take: a later one is left to the next call."""


@dataclass
class Steps:
    """What was done for the chains of an account.

    Attributes:
        stepped: Chains for which all was done that could be done now.
        held: Chains that another process controls.
        failed: The error of each chain that could not be continued.
        left: Chains for which no time was left.
    """

    stepped: list[str] = field(default_factory=list)
    held: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)


def step_chains(
    client: Client,
    *,
    backend: str = DEFAULT_BACKEND,
    job: str = "",
    report: Callable[[str], None] = print_line,
    has_time: Callable[[], bool] = lambda: True,
) -> Steps:
    """Do for each chain of an account that has not ended what can be done now. Wait for nothing.

    Args:
        client: The client.
        backend: The backend with the account.
        job: Name of a training job, whose chain is the only one that is continued; empty for all chains.
        report: Called with one line about each change.
        has_time: Returns whether another chain may be continued.

    Raises:
        CloudError: AWS refused or cannot be reached.
    """
    steps = Steps()
    chains = account_chains(client, backend)
    if chains is None:
        return steps
    for name in _open_chains(chains):
        if not has_time():
            steps.left.append(name)
            continue
        try:
            if _is_wanted(chains, name, job):
                _step(client, backend, name, report)
                steps.stepped.append(name)
        except LockedError:
            steps.held.append(name)
        except CloudtrainError as error:
            steps.failed[name] = error.message
            report(f"{name}: error: {error.for_terminal()}")
    return steps


def _open_chains(chains: AccountChains) -> list[str]:
    """Return the chains that are not known to have ended, those first whose last step is the longest ago."""
    found: dict[str, dict[str, float]] = {}
    with aws_errors("list the chains of the account"):
        for entry in list_objects(chains.s3, f"{chains.base}/"):
            folder, _, name = entry["Key"].rpartition("/")
            moments = found.setdefault(folder.rpartition("/")[2], {})
            moments[name] = entry["LastModified"].timestamp()
    opened = {
        chain: moments.get(LOCK_OBJECT, 0.0)
        for chain, moments in found.items()
        if is_run_id(chain) and CHAIN_FILE in moments and _ENDED_OBJECT not in moments
    }
    return sorted(opened, key=lambda chain: opened[chain])


def _is_wanted(chains: AccountChains, name: str, job: str) -> bool:
    """Return whether a chain has not ended, and has a certain job if one is named."""
    chain = chains.read(name)
    if chain is None:
        return False
    if chain.state is not None:
        with aws_errors(f"mark the end of {name}"):
            put_object(chains.s3, f"{chains.uri_of(name)}/{_ENDED_OBJECT}", b"")
        return False
    return not job or job in (each.run for each in chain.attempts)


def _step(client: Client, backend: str, name: str, report: Callable[[str], None]) -> None:
    stored = adopt(client, name, backend)
    if stored is None:
        return
    settings = client.session.settings
    with open_controller(
        stored, report=lambda line: report(f"{name}: {line}"), settings=settings
    ) as controller:
        if controller is not None:
            controller.advance()


def handler(event: Mapping[str, Any], context: Any) -> dict[str, Any]:
    """Continue the chain of a training job that has ended, or all chains: the entry of the Lambda function.

    Settings are those of the environment (`CLOUDTRAIN_BUCKET` and others).

    Args:
        event: An event "SageMaker Training Job State Change", or one of a schedule.
        context: Lambda's, for the time that is left.

    Returns:
        The chains by what was done, which the function's log shows.
    """
    job = ""
    detail = event.get("detail") or {}
    if event.get("source") == "aws.sagemaker":
        job = str(detail.get("TrainingJobName", ""))
        if not job or detail.get("TrainingJobStatus") not in _FINAL:
            return {}
    end = time.monotonic() + context.get_remaining_time_in_millis() / 1000
    steps = step_chains(Client(), job=job, has_time=lambda: time.monotonic() + _LEAST_SECONDS < end)
    found = {name: value for name, value in vars(steps).items() if value}
    print_line(f"{job or 'all chains'}: {found or 'nothing to do'}")
    return found
