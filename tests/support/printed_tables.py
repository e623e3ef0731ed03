"""Prints every table with names that are too long for a line, for tests on a pseudo-terminal.

    PYTHONPATH=tests python -m support.printed_tables NAME

Status objects and histories are made up; the functions that print them are those of the commands.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import UTC, date, datetime
from pathlib import Path

from cloudtrain import catalog
from cloudtrain.client.removal import Removal
from cloudtrain.console.checkpoints import print_checkpoints, print_download
from cloudtrain.console.metrics import print_comparison, print_history
from cloudtrain.console.removal import print_removal
from cloudtrain.controllers.budget import Budget
from cloudtrain.features.costs.output import print_costs, print_prices
from cloudtrain.features.costs.sums import RunCost, sum_costs
from cloudtrain.features.serving.endpoints import Endpoint
from cloudtrain.features.serving.output import print_endpoints
from cloudtrain.features.setup.output import print_machine_checks, print_new_job, print_profiles
from cloudtrain.features.sweeps.output import print_sweep
from cloudtrain.features.sweeps.results import SweepState, SweepStatus
from cloudtrain.features.sweeps.trial import Trial, TrialState
from cloudtrain.runs.billing import Billing
from cloudtrain.runs.checkpoints import CheckpointFolder, SavedCheckpoint
from cloudtrain.runs.comparison import ComparedMetric, ComparedSetting, Comparison
from cloudtrain.runs.downloads import Download
from cloudtrain.runs.file_transfer import CopiedFile
from cloudtrain.runs.history import MetricHistory
from cloudtrain.runs.status import State, Status
from cloudtrain.support.checks import note, passed

JOB = "a-job-with-a-name-that-is-as-long-as-it-c"
RUN = f"{JOB}-261120-101500-1a2b3c"
METRIC = "validation/a_metric_with_a_long_name_"
NOW = datetime(2026, 11, 20, 10, 15, tzinfo=UTC)


def sweep() -> None:
    """A ranking with more searched fields than a line has room for."""
    fields = ("train.learning_rate", "code.args.width", "code.args.dropout", "train.weight_decay")
    trials = tuple(
        Trial(
            number,
            dict.fromkeys(fields, 0.123456789 * (number + 1)),
            state=TrialState.SUCCEEDED if number else TrialState.FAILED,
            run=RUN,
            objective=0.987654321 - number / 7,
            settled_usd=1234.5,
            reason="" if number else "the loss was not finite in the first step of the training",
        )
        for number in range(12)
    )
    print_sweep(
        SweepStatus(
            sweep=f"{JOB}-261120-101500-1a2b3c",
            state=SweepState.SUCCEEDED,
            reason="",
            engine="optuna",
            backend="sagemaker",
            metric=METRIC,
            is_maximized=True,
            trials=trials,
            planned_trials=20,
            budget=Budget.of(5000.0, trials),
        )
    )


def _compared(count: int) -> Comparison:
    settings = ("code.digest", "data.train.source", "train.learning_rate")
    values = ("sha256:" + "1f" * 32, "s3://a-bucket-with-a-long-name/a/long/prefix/", 0.000123456)
    metrics = [f"{METRIC}{place}" for place in range(3)]
    figures = tuple(2696.123456 / (place + 1) for place in range(count))
    return Comparison(
        runs=tuple(f"local:{JOB}-261120-101500-{place:06x}" for place in range(count)),
        settings=tuple(
            ComparedSetting(path, (value,) * count)
            for path, value in zip(settings, values, strict=True)
        ),
        metrics=tuple(ComparedMetric(metric, figures, figures, 0) for metric in metrics),
    )


def compare_two() -> None:
    """Two runs, side by side."""
    print_comparison(_compared(2))


def compare_many() -> None:
    """More runs than a line has room for."""
    print_comparison(_compared(9))


def metrics() -> None:
    """A history of many metrics."""
    history = MetricHistory()
    for step in range(1, 90):
        values = {f"a_metric_with_a_long_name_{place}": 1 / (step + place) for place in range(9)}
        history.add({"event": "step", "step": step, "loss": 1234.5678 / step, "metrics": values})
    print_history(history, show_all=False)


def checkpoints() -> None:
    """Checkpoints of another run, one of them damaged."""
    found = [
        SavedCheckpoint(
            step=step,
            name=f"step-{step:08}",
            uri=f"s3://bucket/a/long/prefix/step-{step:08}",
            state="complete" if step < 300 else "damaged",
            why="" if step < 300 else "rank-00003.safetensors has other bytes than were written",
            bytes=123_456_789_012,
            files=9,
            run=RUN,
        )
        for step in (100, 200, 300)
    ]
    print_checkpoints(found, CheckpointFolder("s3://bucket/a/long/prefix"))


def download() -> None:
    """Files with long paths."""
    files = tuple(
        CopiedFile(
            path=f"{'a-long-name-of-a-file-' * 4}{place}",
            bytes=10**9 * place,
            sha256="1f" * 32,
            verified="sha256",
            is_new=True,
        )
        for place in range(3)
    )
    print_download(Download(run=RUN, folder=Path("folder"), files=files, left_out={}, missing={}))


def costs() -> None:
    """Runs of an account, of which one saved by spot, beside those of this machine."""
    billing = Billing(
        instance_type="ml.p5.48xlarge",
        instances=4,
        region="us-west-2",
        usd_per_hour=250.0,
        billable_seconds=3_600_000,
        training_seconds=7_200_000,
        is_spot=True,
    )
    runs = [
        RunCost(f"sagemaker:{RUN}", "FAILED", NOW, billing, has_failed=True, group=f"{JOB}-{place}")
        for place in range(3)
    ]
    local = RunCost(f"local:{RUN}", "SUCCEEDED", NOW, Billing(), machine_seconds=12_240.0)
    print_costs(sum_costs([*runs, local]))


def prices() -> None:
    """The prices of a region, whose sources have long names."""
    print_prices(catalog.bundled_prices(), "us-west-2", date(2026, 11, 20))


def endpoints() -> None:
    """Endpoints with long names."""
    print_endpoints(
        [
            Endpoint(
                name=f"{RUN}-{place}",
                backend="sagemaker",
                status="InService",
                capacity="2 x ml.g5.12xlarge",
                usd_per_hour=14.18,
                created=NOW,
                invocations=123_456,
                is_idle=False,
            )
            for place in range(2)
        ],
        3600.0,
    )


def rm() -> None:
    """Runs to delete, and one that is kept."""
    status = Status(run=RUN, backend="local", state=State.SUCCEEDED)
    kept = {RUN: f"best {METRIC} of {JOB}: 0.9876, which other runs continue"}
    print_removal(Removal(runs=(status,), kept=kept), {status.reference: 123_456_789})


def profiles() -> None:
    """Profiles with long roles."""
    role = "arn:aws:iam::123456789012:role/service-role/a-role-with-a-long-name-of-a-team"
    values = {"region": "us-gov-west-1", "bucket": "a-bucket-with-a-long-name-" * 2, "role": role}
    print_profiles({None: values, "a-profile-of-a-team-with-a-long-name": values}, None)


def doctor() -> None:
    """Checks of this machine with long sentences."""
    long = "a sentence about this machine that has more words than a line has room for them"
    print_machine_checks([passed("torch", long), note("GPUs", long, f"do {long}")], is_ready=True)


def init() -> None:
    """A new job with many files."""
    print_new_job(
        Path("a-folder"),
        [f"a-file-with-a-name-{place}.py" for place in range(9)],
        needs_install=True,
    )


TABLES: dict[str, Callable[[], None]] = {
    each.__name__: each
    for each in (
        sweep,
        compare_two,
        compare_many,
        metrics,
        checkpoints,
        download,
        costs,
        prices,
        endpoints,
        rm,
        profiles,
        doctor,
        init,
    )
}

if __name__ == "__main__":
    TABLES[sys.argv[1]]()
