"""The job's values by field of job.yaml, read from its request and configuration, to fill into actions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from cloudtrain.failure_rules.rules.base import Jobs, Places
from cloudtrain.support.backend_facts import facts_of

Facts = Mapping[str, str]
"""Value as job.yaml writes it, by dotted path of the field. Unknown fields are missing."""

_SECONDS = (("d", 86400), ("h", 3600), ("m", 60), ("s", 1))


EXCLUDED_FILE = "left_out:"
"""Prefix of the facts about files that the bundle excludes; the value of such a fact is the reason."""

BUNDLED_MODULE = "module:"
"""Prefix of the facts about modules and packages of the bundle; the value is the path there."""


def read_facts(
    request: Mapping[str, Any], config: Mapping[str, Any], plan: Mapping[str, Any] | None = None
) -> dict[str, str]:
    """Return the known values of a job.

    Args:
        request: The CreateTrainingJob document, or the description of the job.
        config: The content of run.json, or nothing.
        plan: The content of plan.json, or nothing.
    """
    excluded = {
        f"{EXCLUDED_FILE}{left['name']}": left["reason"]
        for left in (plan or {}).get("left_out", [])
    }
    modules = {
        f"{BUNDLED_MODULE}{module['name']}": module["path"]
        for module in (plan or {}).get("modules", [])
    }
    found = {**dict(_of_request(request)), **dict(_of_config(config)), **excluded, **modules}
    return {name: str(value) for name, value in found.items() if value not in (None, "", [], "[]")}


def kind_of_job(facts: Facts) -> Jobs:
    """Return the kind of job that facts are about. A job of which nothing is known counts as a script."""
    if "code.task" in facts or any(name.startswith("train.") for name in facts):
        return Jobs.TASK
    if "code.command" in facts:
        return Jobs.COMMAND
    return Jobs.MODULE if "code.module" in facts else Jobs.SCRIPT


def place_of(backend: str) -> Places:
    """Return where a backend's runs take place."""
    known = facts_of(backend)
    if not known.uses_account:
        # A cluster's nodes use the Python of the machine that submits, too.
        return Places.HERE
    return Places.SIMULATION if known.is_on_this_machine else Places.CLOUD


def _of_request(request: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    resources = request.get("ResourceConfig") or {}
    stopping = request.get("StoppingCondition") or {}
    network = request.get("VpcConfig") or {}
    volume = resources.get("VolumeSizeInGB")
    yield (
        "cluster.instance_type",
        resources.get("SelectedInstanceType") or resources.get("InstanceType"),
    )
    yield (
        "cluster.instances",
        resources.get("SelectedInstanceCount") or resources.get("InstanceCount"),
    )
    yield "cluster.volume", f"{volume}GB" if volume else None
    yield "cluster.image", (request.get("AlgorithmSpecification") or {}).get("TrainingImage")
    yield "cluster.network.subnets", ", ".join(network.get("Subnets", []))
    yield "cluster.network.security_groups", ", ".join(network.get("SecurityGroupIds", []))
    yield "cluster.network.isolation", "true" if request.get("EnableNetworkIsolation") else None
    yield "cluster.spot.max_wait", _duration(stopping.get("MaxWaitTimeInSeconds"))
    yield "cluster.max_pending", _duration(stopping.get("MaxPendingTimeInSeconds"))
    yield "limits.runtime", _duration(stopping.get("MaxRuntimeInSeconds"))
    yield "role", str(request.get("RoleArn", "")).rpartition("/")[2]


def _of_config(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield "code.script", config.get("script")
    yield "code.module", config.get("module")
    yield "code.command", " ".join(config.get("command") or ())
    yield "code.task", config.get("task")
    yield "code.requirements", config.get("requirements")
    hang = config.get("hang_seconds")
    yield "limits.hang", _duration(int(hang)) if isinstance(hang, int | float) else None
    for name, value in (config.get("train") or {}).items():
        yield f"train.{name}", value if isinstance(value, str | int | float) else None
    for name, value in (config.get("checkpoint") or {}).items():
        yield f"checkpoint.{name}", value


def _duration(seconds: Any) -> str | None:
    if not isinstance(seconds, int) or seconds <= 0:
        return None
    return next(f"{seconds // size}{unit}" for unit, size in _SECONDS if seconds % size == 0)
