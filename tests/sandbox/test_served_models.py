"""Endpoints of the sandbox with models that really answer."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.jobs import EXAMPLES, command
from support.serving import (
    copied_digits,
    digit_requests,
    direct_answers,
    environment,
    train_digits,
)

pytest.importorskip("uvicorn")
pytestmark = [pytest.mark.processes, pytest.mark.aws, pytest.mark.timeout(600)]

INVOCATIONS = 1000


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    with copied_digits() as folder:
        yield folder


@pytest.fixture(scope="module", autouse=True)
def example() -> Iterator[subprocess.Popen[str]]:
    """examples/digits/endpoint.py with one epoch, which runs beside the other tests in a sandbox of its own."""
    with tempfile.TemporaryDirectory(prefix="example-", dir="/tmp") as folder:
        shutil.copytree(EXAMPLES / "digits", Path(folder) / "digits")
        environ, job = environment(Path(folder)), Path(folder) / "digits" / "job.yaml"
        job.write_text(
            job.read_text(encoding="utf-8").replace("epochs: 12", "epochs: 1"), encoding="utf-8"
        )
        program = [sys.executable, "endpoint.py"]
        started = subprocess.Popen(
            program,
            cwd=Path(folder) / "digits",
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        yield started
        if started.poll() is None:
            started.kill()
            started.communicate()
        subprocess.run(
            [str(command()), "sandbox", "--stop"], env=environ, check=False, capture_output=True
        )


@pytest.fixture(scope="module")
def run(home: Path) -> str:
    """A finished run of the example on this machine."""
    return train_digits(home)


def run_python(home: Path, program: str) -> str:
    return subprocess.check_output(
        [sys.executable, "-c", program], cwd=home / "digits", env=environment(home), text=True
    )


@pytest.fixture
def endpoint_sandbox(home: Path) -> Iterator[None]:
    yield
    stop = [str(command()), "sandbox", "--stop", "--home", str(home / ".cloudtrain" / "sandbox")]
    subprocess.run(stop, env=environment(home), check=False, capture_output=True)


ENDPOINT = """
import json, pathlib, sys
import numpy as np
from concurrent.futures import ThreadPoolExecutor
from botocore.exceptions import ClientError
sys.path.insert(0, TESTS)
import cloudtrain
from support.serving import digit_requests, malformed_requests
options = cloudtrain.serving.EndpointOptions(name="same", scaling=(1, 2))
first = cloudtrain.deploy(RUN, options, sandbox=True)
again = cloudtrain.deploy(RUN, options, sandbox=True)
client = first.account.client("sagemaker-runtime")

def send(content):
    try:
        found = client.invoke_endpoint(EndpointName="same", Body=content.body, ContentType=content.kind)
        return 200, json.loads(found["Body"].read())["outputs"]
    except ClientError as error:
        return error.response["OriginalStatusCode"], error.response["OriginalMessage"]

with ThreadPoolExecutor(8) as clients:
    answers = list(clients.map(send, digit_requests(INVOCATIONS)))
    refused = list(clients.map(send, malformed_requests(40)))
np.savez("endpoint.npz", *[np.asarray(outputs, np.float32) for _, outputs in answers])
listed = cloudtrain.list_endpoints()
deleted = cloudtrain.undeploy("same", sandbox=True)
left = cloudtrain.list_endpoints()
costs = cloudtrain.costs(backend=["sandbox"])
print(json.dumps({
    "costs": [each.to_json() for each in costs.endpoints],
    "statuses": sorted({status for status, _ in answers}),
    "refused": sorted({status for status, _ in refused}),
    "existed": [first.existed, again.existed],
    "listed": [each.to_json() for each in listed],
    "deleted": deleted,
    "left": len(left),
}))
"""


@pytest.mark.usefixtures("endpoint_sandbox")
def test_an_endpoint_of_the_sandbox_gives_the_same_answers(home: Path, run: str) -> None:
    expected: list[Any] = direct_answers(home, run, digit_requests(INVOCATIONS))
    tests = str(Path(__file__).parents[1])
    program = f"TESTS, RUN, INVOCATIONS = {tests!r}, {run!r}, {INVOCATIONS}\n{ENDPOINT}"
    done = json.loads(run_python(home, program))
    assert done["statuses"] == [200]
    assert set(done["refused"]) <= {400, 415}
    assert done["existed"] == [False, True]
    (listed,) = done["listed"]
    assert (listed["name"], listed["status"], listed["is_idle"]) == ("same", "InService", False)
    assert listed["invocations"] >= INVOCATIONS
    assert [each.split()[0] for each in done["deleted"]] == [
        "scaling",
        "endpoint",
        "endpoint",
        "model",
    ]
    assert done["left"] == 0
    (cost,) = done["costs"]
    assert (cost["endpoint"], cost["run"], cost["state"]) == ("same", f"sandbox:{run}", "Deleted")
    assert (cost["instance_type"], cost["instances"], cost["billable_seconds"] > 0) == (
        "ml.m5.xlarge",
        1,
        True,
    )
    with np.load(home / "digits" / "endpoint.npz") as answers:
        for name, wanted in zip(answers.files, expected, strict=True):
            np.testing.assert_allclose(answers[name], wanted, rtol=1e-4, atol=1e-5)


def test_the_example_trains_deploys_invokes_and_deletes(example: subprocess.Popen[str]) -> None:
    assert len((EXAMPLES / "digits" / "endpoint.py").read_text(encoding="utf-8").splitlines()) <= 10
    out, err = example.communicate()
    assert example.returncode == 0, err
    lines = out.splitlines()
    assert lines[0] == "10 scores"
    assert [line.split()[0] for line in lines[1:]] == ["endpoint", "endpoint", "model"]
