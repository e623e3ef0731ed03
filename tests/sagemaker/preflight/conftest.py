"""Fixtures of preflight checks: an account over HTTP, and a function that checks a job.

moto answers the requests that it supports. A server in front of moto answers policy simulation, quotas, and what moto
does not check. Each test breaks one thing, and exactly one check fails with a fix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.aws_frontend import Front, quotas, simulation
from support.preflight import ENOUGH, JOB, put

import cloudtrain
from cloudtrain.support.checks import Check


@pytest.fixture(autouse=True)
def _longer_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give checks more time, because several tests share the processors."""
    monkeypatch.setattr("cloudtrain.preflight.DEADLINE_SECONDS", 60.0)


@pytest.fixture
def account(aws: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Front]:
    """Serve an account that has everything that the job needs."""
    with Front(aws["AWS_ENDPOINT_URL"]).serve() as front:
        monkeypatch.setenv("AWS_ENDPOINT_URL", front.url)
        front.rules["SimulatePrincipalPolicy"] = simulation()
        front.respond("ListServiceQuotas", quotas(ENOUGH))
        front.respond("ListAWSDefaultServiceQuotas", quotas({}))
        for name in ("one", "two", "three"):
            put(f"numbers/{name}", b"12345")
        yield front


@pytest.fixture
def checks(job: Callable[..., Path]) -> Callable[..., dict[str, Check]]:
    """Return a function that checks a job with overrides and returns the checks by name."""

    def check(*overrides: str, text: str = JOB, requirements: str = "") -> dict[str, Check]:
        path = job(text, mine_py="class Mine(Task):\n    def __init__(self): ...\n", train_py="")
        (path.parent / "requirements.txt").write_text(requirements)
        for name in requirements.split():
            if name.endswith(".whl"):
                wheel = path.parent / name
                wheel.parent.mkdir(exist_ok=True)
                wheel.touch()
        found = cloudtrain.check(cloudtrain.validate(path, overrides))
        assert len({each.name for each in found}) == len(found)
        return {each.name: each for each in found}

    return check
