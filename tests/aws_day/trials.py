"""The trials of the day: which jobs each starts, and what it observes. The product's SDK starts, stops and resumes."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from botocore.exceptions import ClientError

from aws_day.times import Times
from cloudtrain import Plan, Run, Status, costs

if TYPE_CHECKING:
    from aws_day.bench import Bench

CODE = Path(__file__).with_name("code")
CPU, GPU, SMDDP = "ml.m5.large", "ml.g4dn.xlarge", "ml.p4d.24xlarge"
LINES = 200
"""Numbered lines that code/probe.py prints."""
STEPS = 100
"""Steps that code/probe.py counts."""
_NOT_RETURNED = ("Tags", "SessionChainingConfig")
"""Members of the request that DescribeTrainingJob has not."""


class RefusedError(Exception):
    """SageMaker, or the client before it, refused a start."""


@dataclass(frozen=True)
class Trial:
    """One trial.

    Attributes:
        name: Its name, as in the table of assumptions.
        jobs: Its jobs, as content of job.yaml by name, for the times of the day.
        observe: Starts the jobs and answers the assumptions.
        starts: How many starts each job's reservation must pay for.
        instance_type: What it needs a quota for.
    """

    name: str
    jobs: Callable[[Times], Mapping[str, Mapping[str, Any]]]
    observe: Callable[[Bench], None]
    starts: Mapping[str, int] = field(default_factory=dict)
    instance_type: str = CPU


def write_job(folder: Path, name: str, document: Mapping[str, Any]) -> Path:
    """Write a job's folder; return the path of its job.yaml."""
    shutil.copytree(CODE, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump({"name": name, **document}, sort_keys=False), encoding="utf-8")
    return path


# ---------------------------------------------------------------- jobs


def _probe(
    *words: object, instance_type: str = CPU, runtime: int, cluster: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    return {
        "code": {"command": ["python", "probe.py", *map(str, words)], "launcher": "own"},
        "cluster": {"instance_type": instance_type, "instances": 1, **(cluster or {})},
        "metrics": {"loss": "loss=([0-9.]+)"},
        "limits": {"runtime": f"{runtime}s"},
    }


def _ranks(instance_type: str, runtime: int, **cluster: Any) -> dict[str, Any]:
    return {
        "code": {"script": "all_reduce.py"},
        "cluster": {"instance_type": instance_type, **cluster},
        "limits": {"runtime": f"{runtime}s"},
    }


# ---------------------------------------------------------------- what several trials observe


def statuses(description: Mapping[str, Any]) -> list[str]:
    """Return the secondary statuses of a job, in order."""
    return [each["Status"] for each in description["SecondaryStatusTransitions"]]


def differences(request: Mapping[str, Any], description: Mapping[str, Any]) -> list[str]:
    """Return the members of a request that a description returns otherwise, with their paths."""
    found: list[str] = []

    def compare(sent: Any, returned: Any, path: str) -> None:
        if isinstance(sent, Mapping) and isinstance(returned, Mapping):
            for name, value in sent.items():
                # AWS leaves out what is false or empty.
                if name in returned or value not in (False, None, [], {}):
                    compare(value, returned.get(name), f"{path}.{name}".lstrip("."))
        elif isinstance(sent, list) and isinstance(returned, list) and len(sent) == len(returned):
            for index, (one, other) in enumerate(zip(sent, returned, strict=True)):
                compare(one, other, f"{path}[{index}]")
        elif sent != returned and _uri(sent) != _uri(returned):
            found.append(f"{path}: sent {sent!r:.80}, returned {returned!r:.80}")

    sent = {name: value for name, value in request.items() if name not in _NOT_RETURNED}
    compare(sent, description, "")
    return found


def _uri(value: Any) -> Any:
    """Return an S3 uri without the slash at its end, which AWS may add or remove."""
    return value.rstrip("/") if isinstance(value, str) and value.startswith("s3://") else value


def _outcome(bench: Bench, run: Run, description: Mapping[str, Any]) -> list[str]:
    return [description["TrainingJobStatus"], str(bench.client.status(run.reference).state)]


def _seconds_to(description: Mapping[str, Any], status: str) -> float:
    for each in description["SecondaryStatusTransitions"]:
        if each["Status"] == status:
            seconds: float = (each["StartTime"] - description["CreationTime"]).total_seconds()
            return seconds
    raise ValueError(f"the job was never {status}")


def _kind(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [each for each in events if each["kind"] == kind]


# ---------------------------------------------------------------- the trials


def _complete(bench: Bench) -> None:
    run, plan = bench.submit("complete")
    bench.answer("request.accepted", True)
    bench.answer("submit.same_name", _create_again(bench, plan.request))
    again = bench.client.submit(bench.path("complete"), skip_check=True)
    bench.started(again.id)
    named = bench.job_name("complete")
    count = sum(each["TrainingJobName"].startswith(named) for each in bench.account.jobs())
    bench.answer("submit.twice", {"attached": again.attached, "jobs": count})
    done = bench.wait(run.id)
    bench.answer("request.described", differences(plan.request, done))
    bench.answer("statuses.complete", statuses(done))
    spans = done["SecondaryStatusTransitions"]
    contiguous = all(
        abs((b["StartTime"] - a["EndTime"]).total_seconds()) < 1.5 for a, b in pairwise(spans)
    )
    bench.answer("statuses.contiguous", contiguous)
    bench.answer("status.complete", _outcome(bench, run, done))
    events = bench.events(run.id, "done")
    bench.answer("logs.streams", bench.account.streams(run.id))
    delays = [each["ingested"] - each["time"] for each in events]
    bench.answer("logs.delay", round(max(delays), 1))
    bench.answer("logs.complete", _lines(bench, run))
    metrics = [
        [each["MetricName"], round(each["Value"], 6)] for each in bench.final_metrics(run.id)
    ]
    bench.answer("metrics.final", metrics)
    bench.answer("model.place", _model(bench, plan, done))
    facts = _kind(events, "facts")
    bench.answer("container.config", facts[0]["config_files"])
    bench.note(facts[0], "python", "cpus", "channels")
    _bills(bench, run, plan, done)


def _create_again(bench: Bench, request: Mapping[str, Any]) -> str:
    """Send the request of a job again; return the error's code, or an empty string.

    cloudtrain never does that, so boto3 sends it. Should the account accept it, the reservation pays for it.
    """
    try:
        bench.account.client("sagemaker").create_training_job(**request)
    except ClientError as error:
        return str(error.response["Error"]["Code"])
    return ""


def _lines(bench: Bench, run: Run) -> str:
    numbers = [
        int(line.text.removeprefix("line "))
        for line in bench.client.logs(run.reference)
        if line.text.startswith("line ")
    ]
    order = "in order" if numbers == sorted(set(numbers)) else "not in order, or repeated"
    return f"{len(numbers)} of {LINES}, {order}"


def _model(bench: Bench, plan: Plan, done: Mapping[str, Any]) -> list[bool]:
    name = done["TrainingJobName"]
    place = (
        f"{plan.request['OutputDataConfig']['S3OutputPath'].rstrip('/')}/{name}/output/model.tar.gz"
    )
    is_there = done.get("ModelArtifacts", {}).get("S3ModelArtifacts") == place
    bucket, _, key = place.removeprefix("s3://").partition("/")
    is_stored = False
    with suppress(ClientError):
        is_stored = (
            bench.account.client("s3").head_object(Bucket=bucket, Key=key)["ContentLength"] > 0
        )
    return [is_there, is_stored]


def _bills(bench: Bench, run: Run, plan: Plan, done: Mapping[str, Any]) -> None:
    billable = done["BillableTimeInSeconds"]
    bench.answer("bill.seconds", billable - done["TrainingTimeInSeconds"])
    status: Status = bench.client.status(run.reference)
    phases = sum(
        (each.ended - each.started).total_seconds()
        for each in status.phases
        if each.is_billed and each.ended is not None
    )
    bench.answer("bill.phases", round(billable - phases, 1))
    since = datetime.now(UTC) - timedelta(days=1)
    shown = costs(client=bench.client, since=since, backend="sagemaker")
    (own,) = [each for each in shown.runs if each.run == run.reference]
    price = plan.cost.usd_per_hour or 0.0
    bench.answer("bill.ledger", round((own.billing.cost_usd or 0.0) - price * billable / 3600, 6))


def _fails(bench: Bench) -> None:
    run, _ = bench.submit("failure")
    done = bench.wait(run.id)
    bench.answer("failure.status", _outcome(bench, run, done))
    bench.answer("failure.reason", done.get("FailureReason", ""))
    bench.answer("failure.statuses", statuses(done))


def _is_killed(bench: Bench) -> None:
    """Stop a job whose only process ignores SIGTERM.

    cloudtrain's launcher would end it before AWS does, so the request of the plan is sent with another entry point.
    """
    plan = bench.plan("grace")
    script = (CODE / "stubborn.sh").read_text(encoding="utf-8")
    algorithm = {**plan.request["AlgorithmSpecification"]}
    # An entry point has at most 256 characters and no line breaks.
    algorithm["ContainerEntrypoint"] = ["/bin/bash", "-c", 'eval "$SCRIPT"']
    name = bench.job_name("grace")
    members = {
        "TrainingJobName": name,
        "AlgorithmSpecification": algorithm,
        "Environment": {"SCRIPT": script},
        "InputDataConfig": [],
    }
    bench.create({**plan.request, **members})
    bench.wait_for_event(name, "begin")
    bench.stop(name)
    done = bench.wait(name)
    events = bench.events(name, "alive")
    term = _kind(events, "term")
    if term:
        grace = round(events[-1]["time"] - term[0]["time"], 1)
        longest = max(after["time"] - before["time"] for before, after in pairwise(events))
        bench.answer("stop.grace", grace, f"its longest silence was {longest:.1f} s")
    else:
        bench.answer("stop.grace", 0.0, "the container got no SIGTERM")
    bench.answer("stop.statuses", statuses(done))
    bench.answer("stop.status", done["TrainingJobStatus"])
    try:
        bench.stop(name)
    except ClientError as error:
        bench.answer("stop.again", error.response["Error"]["Code"])
    else:
        bench.answer("stop.again", "")


def _resumes(bench: Bench) -> None:
    run, _ = bench.submit("resume")
    bench.wait_for_event(run.id, "begin")
    bench.pause(bench.times.count / 10)
    bench.client.stop(run.reference)
    done = bench.wait(run.id)
    bench.answer("stop.own_end", _outcome(bench, run, done))
    ended = _kind(bench.events(run.id, "end"), "end")[-1]
    state = bench.checkpoint(run.id, "state.json")
    bench.answer("resume.uploaded", state == [ended["step"], ended["digest"]])
    bench.note({"stopped_step": ended["step"]}, "stopped_step")
    again = bench.resume(run)
    bench.wait(again.id)
    events = bench.events(again.id, "end")
    begun, last = _kind(events, "begin")[0], _kind(events, "end")[-1]
    continues = [begun["step"], begun["digest"]] == [ended["step"], ended["digest"]]
    bench.answer(
        "resume.exact",
        {
            "from": "the stopped step" if continues else f"step {begun['step']} of {ended['step']}",
            "digest": "equal" if last["digest"] == chain(STEPS) else "not equal",
        },
    )


def chain(steps: int) -> str:
    """Return the digest that code/probe.py has after so many steps without a break."""
    import hashlib

    digest = ""
    for step in range(1, steps + 1):
        digest = hashlib.sha256(f"{digest} {step}".encode()).hexdigest()
    return digest


def _reaches_limit(bench: Bench) -> None:
    run, _ = bench.submit("limit")
    done = bench.wait(run.id)
    state = bench.client.status(run.reference).state
    bench.answer("limit.status", [done["TrainingJobStatus"], done["SecondaryStatus"], str(state)])
    bench.answer("limit.signal", bool(_kind(bench.events(run.id, "signal"), "signal")))
    bench.answer("limit.billed", done["BillableTimeInSeconds"])


def _is_spot(bench: Bench) -> None:
    run, _ = bench.submit("spot")
    done = bench.wait(run.id)
    seconds = {"billable": done["BillableTimeInSeconds"], "training": done["TrainingTimeInSeconds"]}
    bench.answer("spot.billed", seconds)
    wait = done["StoppingCondition"].get("MaxWaitTimeInSeconds")
    bench.answer("spot.described", [done.get("EnableManagedSpotTraining"), wait])


def _is_warm(bench: Bench) -> None:
    first, _ = bench.submit("warm-1")
    done = bench.wait(first.id)
    bench.answer("pool.available", bench.pool_status(first.id, "Available"))
    second, _ = bench.submit("warm-2")
    taken = bench.wait(second.id)
    pool = bench.account.describe(first.id).get("WarmPoolStatus", {})
    by = "the second job" if pool.get("ReusedByJob") == second.id else str(pool.get("ReusedByJob"))
    bench.answer("pool.reused", [pool.get("Status"), by])
    starts = {"first": _seconds_to(done, "Training"), "second": _seconds_to(taken, "Training")}
    bench.answer("pool.start", {name: round(value, 1) for name, value in starts.items()})
    bench.answer("pool.billed", pool.get("ResourceRetainedBillableTimeInSeconds"))
    bench.pool_status(second.id, "Available")
    with suppress(Exception):
        # Without a pool there is nothing to end, and the answer says so.
        second.end_warm_pool()
    bench.answer("pool.ended", bench.pool_status(second.id, "Terminated"))


def _sum(events: list[dict[str, Any]]) -> dict[str, Any]:
    found = _kind(events, "sum")
    if not found:
        return {"world": 0, "sum": 0.0, "ranks": []}
    return {
        "world": found[0]["world"],
        "sum": found[0]["sum"],
        "ranks": sorted(each["rank"] for each in found),
    }


def _two_instances(bench: Bench) -> None:
    run, _ = bench.submit("two")
    bench.wait(run.id)
    bench.answer("instances.sum", _sum(bench.events(run.id, "sum", count=2)))
    hosts = {re.sub(r"-\d+$", "", name) for name in bench.account.streams(run.id)}
    bench.answer("instances.streams", sorted(hosts))


def _gpu(bench: Bench) -> None:
    run, plan = bench.submit("gpu")
    bench.answer("gpu.accepted", True)
    done = bench.wait(run.id)
    bench.answer("gpu.described", differences(plan.request, done))
    bench.answer("gpu.status", _outcome(bench, run, done))
    facts = _kind(bench.events(run.id, "done"), "facts")
    bench.note(facts[0], "gpus", "python", "cpus")


def _toolkit(bench: Bench) -> None:
    run, _ = bench.submit("toolkit")
    done = bench.wait(run.id)
    bench.answer("toolkit.status", _outcome(bench, run, done))
    bench.answer("toolkit.sum", _sum(bench.events(run.id, "sum")))


def _warm_job(times: Times, number: int) -> dict[str, Any]:
    # No other job of the day has this volume, so none of them takes the pool.
    cluster = {"keep_alive": f"{times.keep_alive}s", "volume": "31GB"}
    # Another argument makes another request, which the second submit would otherwise find live.
    return _probe("complete", times.work / 4 + number / 100, runtime=times.runtime, cluster=cluster)


def _two_jobs(times: Times) -> dict[str, dict[str, Any]]:
    cluster = {"instances": 2, "processes_per_instance": 1, "distribution": "torch_distributed"}
    return {"two": _ranks(CPU, times.runtime, **cluster)}


def _toolkit_jobs(times: Times) -> dict[str, dict[str, Any]]:
    return {"toolkit": _ranks(SMDDP, times.runtime, instances=1, distribution="pytorchddp")}


TRIALS: tuple[Trial, ...] = (
    Trial(
        "complete", lambda t: {"complete": _probe("complete", t.work, runtime=t.runtime)}, _complete,
        # The second submit and the second request of the same name start nothing, or differ from what is assumed.
        starts={"complete": 3},
    ),
    Trial("failure", lambda t: {"failure": _probe("fail", runtime=t.runtime)}, _fails),
    Trial("grace", lambda t: {"grace": _probe("forever", runtime=t.runtime)}, _is_killed),
    Trial(
        "resume", lambda t: {"resume": _probe("count", t.count / STEPS, runtime=t.runtime)}, _resumes,
        starts={"resume": 2},
    ),
    Trial("limit", lambda t: {"limit": _probe("forever", runtime=t.limit)}, _reaches_limit),
    Trial(
        "spot",
        lambda t: {"spot": _probe(
            "complete", t.work, runtime=t.runtime, cluster={"spot": {"max_wait": f"{t.spot_wait}s"}}
        )},
        _is_spot,
    ),
    Trial("warm pool", lambda t: {f"warm-{n}": _warm_job(t, n) for n in (1, 2)}, _is_warm),
    Trial("two instances", _two_jobs, _two_instances),
    Trial(
        "gpu",
        lambda t: {"gpu": _probe("complete", t.work / 4, runtime=t.runtime, instance_type=GPU)},
        _gpu,
        instance_type=GPU,
    ),
    Trial("toolkit", _toolkit_jobs, _toolkit, instance_type=SMDDP),
)  # fmt: skip
"""In the order of their description; the day starts the cheapest first."""
