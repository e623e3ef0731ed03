"""Tuning jobs in the sandbox through clients of AWS: their trials are real training jobs."""

from __future__ import annotations

import copy
import io
import json
import random
import tarfile
from collections.abc import Callable
from typing import Any

import pytest
from botocore.exceptions import ClientError
from support.jobs import until
from support.sandboxes import Served, model_of, unknown_fields

from cloudtrain.backends.sandbox.tuning_search import (
    CATEGORICAL,
    CONTINUOUS,
    INTEGER,
    check_ranges,
    sample,
)

pytestmark = [pytest.mark.processes, pytest.mark.aws]

IMAGE = "763104351884.dkr.ecr.us-west-2.amazonaws.com/pytorch-training:2.5.1-cpu-py311"
SCRIPT = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.add_argument("--depth", type=int)
parser.add_argument("--kind")
parser.add_argument("--size")
given = parser.parse_args()
assert given.kind in ("a", "b") and given.size == "8"
print(f"score={given.lr:.6f}")
"""
FINAL = ("Completed", "Failed", "Stopped")


def upload(sandbox: Served, script: str) -> str:
    """Store a script as an estimator does; return its URI."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        member = tarfile.TarInfo("train.py")
        member.size = len(script)
        archive.addfile(member, io.BytesIO(script.encode()))
    key = f"tuning/{abs(hash(script))}/sourcedir.tar.gz"
    sandbox.client("s3").put_object(Bucket=sandbox.info["bucket"], Key=key, Body=packed.getvalue())
    return f"s3://{sandbox.info['bucket']}/{key}"


def tuning_request(sandbox: Served, name: str, script: str = SCRIPT) -> dict[str, Any]:
    """Return a request like that of a HyperparameterTuner with a PyTorch estimator."""
    ranges = {
        CONTINUOUS: [
            {"Name": "lr", "MinValue": "1e-4", "MaxValue": "0.1", "ScalingType": "Logarithmic"}
        ],
        INTEGER: [{"Name": "depth", "MinValue": "1", "MaxValue": "3", "ScalingType": "Auto"}],
        CATEGORICAL: [{"Name": "kind", "Values": ['"a"', '"b"']}],
    }
    static = {"sagemaker_program": '"train.py"', "size": "8"}
    return {
        "HyperParameterTuningJobName": name,
        "HyperParameterTuningJobConfig": {
            "Strategy": "Random",
            "ResourceLimits": {"MaxNumberOfTrainingJobs": 4, "MaxParallelTrainingJobs": 2},
            "TrainingJobEarlyStoppingType": "Off",
            "HyperParameterTuningJobObjective": {"Type": "Minimize", "MetricName": "score"},
            "ParameterRanges": ranges,
            "RandomSeed": 7,
        },
        "TrainingJobDefinition": {
            "StaticHyperParameters": {
                **static,
                "sagemaker_submit_directory": json.dumps(upload(sandbox, script)),
            },
            "RoleArn": sandbox.info["role"],
            "OutputDataConfig": {"S3OutputPath": f"s3://{sandbox.info['bucket']}/out"},
            "StoppingCondition": {"MaxRuntimeInSeconds": 600},
            "HyperParameterTuningResourceConfig": {
                "InstanceType": "ml.m5.large",
                "InstanceCount": 1,
                "VolumeSizeInGB": 10,
            },
            "AlgorithmSpecification": {
                "TrainingInputMode": "File",
                "TrainingImage": IMAGE,
                "MetricDefinitions": [{"Name": "score", "Regex": "score=([0-9.]+)"}],
            },
        },
        "Tags": [{"Key": "team", "Value": "vision"}],
    }


def end_of(client: Any, name: str) -> dict[str, Any]:
    """Wait until a tuning job has ended; return its description."""

    def describe() -> dict[str, Any]:
        described: dict[str, Any] = client.describe_hyper_parameter_tuning_job(
            HyperParameterTuningJobName=name
        )
        return described

    until(lambda: describe()["HyperParameterTuningJobStatus"] in FINAL)
    return describe()


def code_of(call: Callable[..., Any], **arguments: Any) -> tuple[str, str]:
    with pytest.raises(ClientError) as caught:
        call(**arguments)
    error = caught.value.response["Error"]
    return error["Code"], error["Message"]


def test_a_tuning_job_ranks_four_real_trials(sandbox: Served) -> None:
    client = sandbox.client("sagemaker")
    request = tuning_request(sandbox, "ranked")
    arn = client.create_hyper_parameter_tuning_job(**request)["HyperParameterTuningJobArn"]
    done = end_of(client, "ranked")
    assert done["HyperParameterTuningJobStatus"] == "Completed"
    assert (
        done["TrainingJobStatusCounters"]["Completed"]
        == done["ObjectiveStatusCounters"]["Succeeded"]
        == 4
    )
    trials = client.list_training_jobs_for_hyper_parameter_tuning_job(
        HyperParameterTuningJobName="ranked", SortBy="FinalObjectiveMetricValue"
    )["TrainingJobSummaries"]
    values = [trial["FinalHyperParameterTuningJobObjectiveMetric"]["Value"] for trial in trials]
    assert values == sorted(values)
    assert values == [round(float(trial["TunedHyperParameters"]["lr"]), 6) for trial in trials]
    assert done["BestTrainingJob"]["TrainingJobName"] == trials[0]["TrainingJobName"]
    assert sorted(trial["TrainingJobName"][:10] for trial in trials) == [
        f"ranked-{n:03d}" for n in (1, 2, 3, 4)
    ]
    best = client.describe_training_job(TrainingJobName=trials[0]["TrainingJobName"])
    assert best["TuningJobArn"] == arn
    assert best["HyperParameters"]["_tuning_objective_metric"] == "score"
    assert best["HyperParameters"]["kind"] in ('"a"', '"b"')
    for described in (arn, best["TrainingJobArn"]):
        assert client.list_tags(ResourceArn=described)["Tags"] == request["Tags"]
    for operation, response in (
        ("DescribeHyperParameterTuningJob", done),
        ("ListTrainingJobsForHyperParameterTuningJob", {"TrainingJobSummaries": trials}),
        (
            "ListHyperParameterTuningJobs",
            client.list_hyper_parameter_tuning_jobs(NameContains="ranked"),
        ),
        ("DescribeTrainingJob", best),
    ):
        response.pop("ResponseMetadata", None)
        assert unknown_fields(response, model_of(operation).output_shape) == []
    assert code_of(client.create_hyper_parameter_tuning_job, **request)[0] == "ResourceInUse"
    stop = client.stop_hyper_parameter_tuning_job
    assert "is in status Completed" in code_of(stop, HyperParameterTuningJobName="ranked")[1]


def test_stop_ends_the_trials_of_a_tuning_job(sandbox: Served) -> None:
    client = sandbox.client("sagemaker")
    client.create_hyper_parameter_tuning_job(
        **tuning_request(sandbox, "stopped", "import time; time.sleep(600)")
    )
    until(lambda: any(job["SecondaryStatus"] == "Training" for job in trials_of(client, "stopped")))
    client.stop_hyper_parameter_tuning_job(HyperParameterTuningJobName="stopped")
    done = end_of(client, "stopped")
    assert done["HyperParameterTuningJobStatus"] == "Stopped"
    assert done["TrainingJobStatusCounters"]["Stopped"] == 2
    assert "BestTrainingJob" not in done


def trials_of(client: Any, name: str) -> list[dict[str, Any]]:
    """Return the descriptions of a tuning job's training jobs."""
    found = client.list_training_jobs_for_hyper_parameter_tuning_job(
        HyperParameterTuningJobName=name
    )
    names = [trial["TrainingJobName"] for trial in found["TrainingJobSummaries"]]
    return [client.describe_training_job(TrainingJobName=each) for each in names]


def test_a_tuning_job_fails_when_all_trials_fail(sandbox: Served) -> None:
    client = sandbox.client("sagemaker")
    client.create_hyper_parameter_tuning_job(
        **tuning_request(sandbox, "failed", "raise ValueError('no data')")
    )
    done = end_of(client, "failed")
    assert done["HyperParameterTuningJobStatus"] == "Failed"
    assert done["FailureReason"].startswith("All training jobs failed.")
    assert done["TrainingJobStatusCounters"]["NonRetryableError"] == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda r: r.update(HyperParameterTuningJobName="x" * 33),
            "hyperParameterTuningJobName' failed to satisfy constraint: AWS allows at most 32 characters",
        ),
        (
            lambda r: r["HyperParameterTuningJobConfig"]["HyperParameterTuningJobObjective"].update(
                MetricName="loss"
            ),
            "The objective metric loss is not defined in MetricDefinitions",
        ),
        (
            lambda r: r["TrainingJobDefinition"]["StaticHyperParameters"].update(lr="1"),
            "The hyperparameter lr is in ParameterRanges and in StaticHyperParameters",
        ),
        (
            lambda r: r["HyperParameterTuningJobConfig"].update(Strategy="Grid"),
            "Only CategoricalParameterRanges are supported with the Grid strategy",
        ),
        (
            lambda r: r.update(Autotune={"Mode": "Enabled"}),
            "cloudtrain sandbox: Autotune is not supported",
        ),
        (
            lambda r: r["TrainingJobDefinition"].update(
                RoleArn="arn:aws:iam::123456789012:role/nobody"
            ),
            "Could not assume role",
        ),
    ],
)
def test_an_invalid_tuning_request_is_refused(
    sandbox: Served, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    request = copy.deepcopy(tuning_request(sandbox, "refused"))
    change(request)
    code, text = code_of(sandbox.client("sagemaker").create_hyper_parameter_tuning_job, **request)
    assert code == "ValidationException"
    assert message in text


def test_an_unknown_tuning_job_is_not_found(sandbox: Served) -> None:
    describe = sandbox.client("sagemaker").describe_hyper_parameter_tuning_job
    assert code_of(describe, HyperParameterTuningJobName="nothing")[0] == "ResourceNotFound"


def test_samples_stay_within_their_ranges() -> None:
    ranges = {
        CONTINUOUS: [
            {"Name": "log", "MinValue": "1e-5", "MaxValue": "1e-1", "ScalingType": "Logarithmic"},
            {
                "Name": "near",
                "MinValue": "0.9",
                "MaxValue": "0.999",
                "ScalingType": "ReverseLogarithmic",
            },
        ],
        INTEGER: [
            {"Name": "size", "MinValue": "1", "MaxValue": "512", "ScalingType": "Logarithmic"}
        ],
        CATEGORICAL: [{"Name": "kind", "Values": ["x", "y"]}],
    }
    assert list(check_ranges(ranges, {}, "Random")) == []
    source = random.Random(1)  # noqa: S311
    found = [sample(ranges, source) for _ in range(500)]
    assert all(
        1e-5 <= float(each["log"]) <= 1e-1 and 0.9 <= float(each["near"]) <= 0.999 for each in found
    )
    assert {each["kind"] for each in found} == {"x", "y"}
    assert all(1 <= int(each["size"]) <= 512 for each in found)
    # On a logarithmic scale, a quarter of the values is in each of the four decades.
    assert 80 <= sum(float(each["log"]) < 1e-4 for each in found) <= 170
