"""Training jobs in the sandbox through clients of AWS, with real processes and HTTP."""

from __future__ import annotations

import io
import itertools
import json
import tarfile
from pathlib import Path
from typing import Any

import psutil
import pytest
from botocore.exceptions import ClientError, HTTPClientError
from support.jobs import processes_of, until
from support.sandboxes import (
    model_of,
    request,
    statuses,
    unknown_fields,
)

pytestmark = [pytest.mark.processes, pytest.mark.aws]

TRAIN = """
mkdir -p "$CLOUDTRAIN_ML_ROOT/model"; echo weights > "$CLOUDTRAIN_ML_ROOT/model/model.pt"
echo "loss=3.5"; echo "loss=0.25"; echo last
"""
FOREVER = "echo ready; while true; do sleep 0.1; done"
STUBBORN = "trap '' TERM; echo ready; while true; do sleep 0.1; done"


def test_a_job_goes_from_request_to_model(sandbox: Any) -> None:
    s3 = sandbox.client("s3")
    for index in range(4):
        s3.put_object(Bucket=sandbox.info["bucket"], Key=f"data/part-{index}", Body=b"x")
    script = TRAIN + 'echo $(ls "$CLOUDTRAIN_ML_ROOT/input/data/train"); echo $AWS_ENDPOINT_URL'
    source = {
        "S3DataType": "S3Prefix",
        "S3Uri": f"s3://{sandbox.info['bucket']}/data",
        "S3DataDistributionType": "ShardedByS3Key",
    }
    fields = {
        "instances": 2,
        "Tags": [{"Key": "team", "Value": "vision"}],
        "Environment": {"A": "b"},
        "InputDataConfig": [{"ChannelName": "train", "DataSource": {"S3DataSource": source}}],
    }
    sandbox.create("complete", script, **fields)
    done = sandbox.end_of("complete")
    assert done["TrainingJobStatus"] == done["SecondaryStatus"] == "Completed"
    assert statuses(done) == ["Starting", "Downloading", "Training", "Uploading", "Completed"]
    spans = [(entry["StartTime"], entry["EndTime"]) for entry in done["SecondaryStatusTransitions"]]
    assert all(end == start for (_, end), (start, _) in itertools.pairwise(spans))
    assert done["CreationTime"] <= done["TrainingStartTime"] <= done["TrainingEndTime"]
    assert done["BillableTimeInSeconds"] == done["TrainingTimeInSeconds"] >= 0
    assert done["Environment"]["A"] == "b"
    assert [(each["MetricName"], each["Value"]) for each in done["FinalMetricDataList"]] == [
        ("loss", 0.25)
    ]
    printed = ["loss=3.5", "loss=0.25", "last"]
    assert sandbox.lines("complete", "algo-1") == [
        *printed,
        "part-0 part-2",
        sandbox.info["endpoint"],
    ]
    assert sandbox.lines("complete", "algo-2") == [
        *printed,
        "part-1 part-3",
        sandbox.info["endpoint"],
    ]
    uri = done["ModelArtifacts"]["S3ModelArtifacts"]
    assert uri == f"s3://{sandbox.info['bucket']}/out/complete/output/model.tar.gz"
    body = s3.get_object(Bucket=sandbox.info["bucket"], Key="out/complete/output/model.tar.gz")[
        "Body"
    ].read()
    with tarfile.open(fileobj=io.BytesIO(body)) as archive:
        assert archive.extractfile("model.pt").read() == b"weights\n"  # type: ignore[union-attr]


def test_responses_match_botocores_model(sandbox: Any) -> None:
    sandbox.create("shape", TRAIN, Tags=[{"Key": "team", "Value": "vision"}])
    sandbox.end_of("shape")
    client = sandbox.client("sagemaker")
    arn = sandbox.describe("shape")["TrainingJobArn"]
    calls = {
        "DescribeTrainingJob": {"TrainingJobName": "shape"},
        "ListTrainingJobs": {"NameContains": "shape"},
        "ListTags": {"ResourceArn": arn},
    }
    methods = {
        "DescribeTrainingJob": client.describe_training_job,
        "ListTrainingJobs": client.list_training_jobs,
        "ListTags": client.list_tags,
    }
    raw: dict[str, Any] = {}
    client.meta.events.register(
        "after-call.sagemaker",
        lambda http_response, model, **_: raw.update({model.name: http_response.content}),
    )
    for name, arguments in calls.items():
        methods[name](**arguments)
        response, shape = json.loads(raw[name]), model_of(name).output_shape
        assert unknown_fields(response, shape) == []
        assert set(shape.required_members) <= set(response)
    requested = set(model_of("CreateTrainingJob").input_shape.members)
    described = set(model_of("DescribeTrainingJob").output_shape.members)
    from cloudtrain.backends.sandbox.training_job import _NOT_DESCRIBED

    assert requested - described == set(_NOT_DESCRIBED)
    assert client.list_tags(ResourceArn=arn)["Tags"] == [{"Key": "team", "Value": "vision"}]
    with pytest.raises(
        ClientError, match="cloudtrain sandbox: DeleteTags is not supported for training jobs"
    ):
        client.delete_tags(ResourceArn=arn, TagKeys=["team"])


def test_the_selected_instance_type_is_described(sandbox: Any) -> None:
    preferences = [
        {"InstanceType": name, "InstanceCount": 2}
        for name in ("ml.p4d.24xlarge", "ml.p4de.24xlarge")
    ]
    resources = {"InstancePreferences": preferences, "VolumeSizeInGB": 10}
    sandbox.create(
        "prefers",
        'cat "$CLOUDTRAIN_ML_ROOT/input/config/resourceconfig.json"',
        ResourceConfig=resources,
    )
    resources = sandbox.end_of("prefers")["ResourceConfig"]
    assert (resources["SelectedInstanceType"], resources["SelectedInstanceCount"]) == (
        "ml.p4d.24xlarge",
        2,
    )
    assert resources["InstancePreferences"] == preferences
    config = json.loads("".join(sandbox.lines("prefers", "algo-2")))
    assert (config["current_host"], config["hosts"]) == ("algo-2", ["algo-1", "algo-2"])


def test_tensorboard_files_are_copied_below_the_jobs_name(sandbox: Any) -> None:
    script = 'cd "$CLOUDTRAIN_ML_ROOT/output/tensorboard"; mkdir a; echo x > a/events'
    board = {"S3OutputPath": f"s3://{sandbox.info['bucket']}/board"}
    sandbox.create("board", script, TensorBoardOutputConfig=board)
    assert sandbox.end_of("board")["TrainingJobStatus"] == "Completed"
    assert sandbox.keys("board/") == ["board/board/tensorboard-output/a/events"]


def test_a_failure_file_and_the_exit_code_become_the_reason(sandbox: Any) -> None:
    script = 'mkdir -p "$CLOUDTRAIN_ML_ROOT/output"; printf "no such column" > "$CLOUDTRAIN_ML_ROOT/output/failure"; exit 3'
    sandbox.create("fails", script)
    sandbox.create("fails-silently", "kill -9 $$")
    done = sandbox.end_of("fails")
    assert done["FailureReason"] == "AlgorithmError: no such column, exit code: 3"
    assert statuses(done) == ["Starting", "Downloading", "Training", "Failed"]
    assert "ModelArtifacts" not in done
    assert sandbox.end_of("fails-silently")["FailureReason"] == "AlgorithmError: , exit code: 137"


def test_stop_sends_sigterm_and_then_sigkill(sandbox: Any) -> None:
    client = sandbox.client("sagemaker")
    kind = f"trap 'echo stopped; exit 0' TERM; {FOREVER}"
    sandbox.create("stops", kind)
    sandbox.create("stubborn", STUBBORN)
    for name in ("stops", "stubborn"):
        until(
            lambda name=name: (
                sandbox.describe(name)["SecondaryStatus"] == "Training" and processes_of(name)
            )
        )
        until(lambda name=name: _ready(sandbox, name))
        client.stop_training_job(TrainingJobName=name)
    for name in ("stops", "stubborn"):
        done = sandbox.end_of(name)
        assert statuses(done)[-4:] == ["Training", "Stopping", "Uploading", "Stopped"]
        assert done["TrainingJobStatus"] == done["SecondaryStatus"] == "Stopped"
        assert processes_of(name) == []
    assert sandbox.lines("stops") == ["ready", "stopped"]
    with pytest.raises(ClientError, match="the training job is in status Stopped"):
        client.stop_training_job(TrainingJobName="stops")


def _ready(sandbox: Any, name: str) -> bool:
    try:
        return "ready" in sandbox.lines(name)
    except ClientError:
        return False


def test_time_limits_differ_from_a_stop(sandbox: Any) -> None:
    sandbox.create("too-long", FOREVER, StoppingCondition={"MaxRuntimeInSeconds": 1})
    done = sandbox.end_of("too-long")
    assert (done["TrainingJobStatus"], done["SecondaryStatus"]) == ("Stopped", "MaxRuntimeExceeded")
    assert done["TrainingTimeInSeconds"] >= 1
    sandbox.set_faults(capacity_after_seconds=3600)
    spot = {"MaxRuntimeInSeconds": 1, "MaxWaitTimeInSeconds": 1}
    sandbox.create("never-comes", FOREVER, StoppingCondition=spot, EnableManagedSpotTraining=True)
    done = sandbox.end_of("never-comes")
    assert (done["TrainingJobStatus"], done["SecondaryStatus"]) == (
        "Stopped",
        "MaxWaitTimeExceeded",
    )
    assert statuses(done) == ["Starting", "Pending", "Stopping", "MaxWaitTimeExceeded"]
    assert "TrainingStartTime" not in done


def test_no_capacity_means_a_wait_or_an_error(sandbox: Any) -> None:
    sandbox.set_faults(capacity_after_seconds=3600)
    sandbox.create("waits", TRAIN)
    sandbox.secondary("waits", "Pending")
    sandbox.set_faults()
    assert statuses(sandbox.end_of("waits"))[:3] == ["Starting", "Pending", "Downloading"]
    sandbox.set_faults(capacity_error_after_seconds=0.5)
    sandbox.create("gives-up", TRAIN)
    assert sandbox.end_of("gives-up")["FailureReason"].startswith(
        "CapacityError: Unable to provision"
    )
    sandbox.set_faults(capacity_after_seconds=3600)
    sandbox.create("stopped-early", TRAIN)
    sandbox.secondary("stopped-early", "Pending")
    sandbox.client("sagemaker").stop_training_job(TrainingJobName="stopped-early")
    assert statuses(sandbox.end_of("stopped-early")) == [
        "Starting",
        "Pending",
        "Stopping",
        "Stopped",
    ]


def test_dead_instance_is_an_internal_error(sandbox: Any, tmp_path: Path) -> None:
    sandbox.set_faults(dead_instance={"host": "algo-2", "step": 2})
    # The two hosts of a job's first attempt wait for the fault. They reach its step when both have counted themselves.
    script = f"""
    starts="{tmp_path}/$(basename "$TRAINING_JOB_ARN")"; echo >> "$starts"
    while [ "$(wc -l < "$starts")" -lt 2 ]; do sleep 0.05; done
    first=$([ "$(wc -l < "$starts")" -gt 2 ] || echo yes)
    echo "CLOUDTRAIN {{\\"event\\": \\"step\\", \\"step\\": 2}}"
    [ -z "$first" ] || sleep 600
    """
    sandbox.create("dies", script, instances=2)
    sandbox.create("retries", script, instances=2, RetryStrategy={"MaximumRetryAttempts": 1})
    assert sandbox.end_of("dies")["FailureReason"].startswith("InternalServerError: ")
    done = sandbox.end_of("retries")
    assert done["TrainingJobStatus"] == "Completed"
    assert "Restarting" in statuses(done)


@pytest.mark.promise
def test_interrupted_spot_job_restarts_with_its_checkpoints(sandbox: Any) -> None:
    sandbox.set_faults(interrupt_at_step=[3])
    # The script counts in a file that SageMaker synchronises with S3. Each attempt starts with an empty tree. The first
    # attempt waits at step 3 for the interruption.
    script = """
    cd "$CLOUDTRAIN_ML_ROOT"; n=$(cat checkpoints/step 2>/dev/null || echo 0); start=$n; echo "from $n"
    while [ $n -lt 6 ]; do
      n=$((n + 1)); echo $n > checkpoints/step; echo "CLOUDTRAIN {\\"event\\": \\"step\\", \\"step\\": $n}"
      if [ $n$start = 30 ]; then sleep 60; fi
    done
    """
    fields = {
        "EnableManagedSpotTraining": True,
        "StoppingCondition": {"MaxRuntimeInSeconds": 60, "MaxWaitTimeInSeconds": 120},
        "CheckpointConfig": {"S3Uri": f"s3://{sandbox.info['bucket']}/kept"},
    }
    sandbox.create("spot", script, **fields)
    done = sandbox.end_of("spot")
    assert done["TrainingJobStatus"] == "Completed"
    assert statuses(done) == [
        *("Starting", "Downloading", "Training", "Interrupted"),
        *("Starting", "Downloading", "Training", "Uploading", "Completed"),
    ]
    starts = [line for line in sandbox.lines("spot") if line.startswith("from")]
    assert starts == ["from 0", "from 3"]
    assert done["BillableTimeInSeconds"] < done["TrainingTimeInSeconds"]
    body = (
        sandbox.client("s3")
        .get_object(Bucket=sandbox.info["bucket"], Key="kept/step")["Body"]
        .read()
    )
    assert body == b"6\n"


def test_a_retry_within_a_run_restores_no_checkpoints(sandbox: Any) -> None:
    sandbox.set_faults(dead_instance={"host": "algo-1", "step": 2})
    # The first attempt waits until its instance dies. The second attempt finds no checkpoints and ends.
    script = """
    cd "$CLOUDTRAIN_ML_ROOT"; echo found $(ls checkpoints); ls checkpoints | grep -q . && is_first=1
    echo own > checkpoints/own; echo "CLOUDTRAIN {\\"event\\": \\"step\\", \\"step\\": 2}"
    if [ "$is_first" ]; then sleep 600; fi
    """
    sandbox.client("s3").put_object(Bucket=sandbox.info["bucket"], Key="retried/old", Body=b"old")
    checkpoints = {"S3Uri": f"s3://{sandbox.info['bucket']}/retried"}
    sandbox.create(
        "retried", script, CheckpointConfig=checkpoints, RetryStrategy={"MaximumRetryAttempts": 1}
    )
    done = sandbox.end_of("retried")
    assert done["TrainingJobStatus"] == "Completed"
    assert "Restarting" in statuses(done)
    assert [line.strip() for line in sandbox.lines("retried") if line.startswith("found")] == [
        "found old",
        "found",
    ]
    assert sandbox.keys("retried/") == ["retried/old", "retried/own"]


def test_faults_are_injected_into_calls(sandbox: Any) -> None:
    client, s3 = sandbox.client("sagemaker"), sandbox.client("s3")
    s3.put_object(Bucket=sandbox.info["bucket"], Key="numbers", Body=b"0123456789")
    sandbox.set_faults(throttle={"ListTrainingJobs": 1}, errors={"GetObject": 1})
    with pytest.raises(ClientError, match="ThrottlingException"):
        client.list_training_jobs()
    client.list_training_jobs()
    with pytest.raises(ClientError, match="InternalError") as broken:
        s3.get_object(Bucket=sandbox.info["bucket"], Key="numbers")
    assert broken.value.response["ResponseMetadata"]["HTTPStatusCode"] == 500
    sandbox.set_faults(resets={"CreateTrainingJob": 1}, torn={"GetObject": 1})
    with pytest.raises(HTTPClientError):
        client.create_training_job(**request(sandbox, "cut", TRAIN))
    assert (
        sandbox.describe("cut")["TrainingJobName"] == "cut"
    )  # the job exists, only the response was lost
    with pytest.raises(HTTPClientError):
        s3.get_object(Bucket=sandbox.info["bucket"], Key="numbers")["Body"].read()
    sandbox.end_of("cut")


def test_no_process_survives_the_sandbox(own_sandbox: Any, tmp_path: Path) -> None:
    with own_sandbox() as served:
        served.create("left", STUBBORN, instances=2)
        until(lambda: len(processes_of("left")) >= 2)
        children = psutil.Process(served.process.pid).children(recursive=True)
        port = served.port
        assert len(children) >= 3
    assert served.process.returncode == 0
    assert [child for child in children if child.is_running()] == []
    assert processes_of("left") == []
    _assert_port_is_closed(port)
    assert not (tmp_path / "own-sandbox" / "sandbox.json").exists()


@pytest.mark.promise
def test_no_process_survives_a_killed_sandbox(own_sandbox: Any) -> None:
    with own_sandbox() as served:
        served.create("orphans", STUBBORN)
        until(lambda: processes_of("orphans"))
        children = psutil.Process(served.process.pid).children(recursive=True)
        served.process.kill()
        until(lambda: not any(child.is_running() for child in children))
    _assert_port_is_closed(served.port)


def _assert_port_is_closed(port: int) -> None:
    import socket

    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0
