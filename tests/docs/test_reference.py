"""The reference pages are what the code generates, and name every public name and every key of JSON output."""

import json
import re
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import pytest
from support import command_pages, command_samples, reference_pages
from support.jobs import EXAMPLES, REPOSITORY, Cli

import cloudtrain
import cloudtrain_runtime
from cloudtrain import Run, Settings, State, Status
from cloudtrain.console.runs import print_logs_json
from cloudtrain.controllers.budget import Budget
from cloudtrain.failure_rules import Explanation
from cloudtrain.features.serving import Deployment, Endpoint, EndpointOptions
from cloudtrain.features.serving.endpoint_request import make_requests
from cloudtrain.features.sweeps import SweepState, SweepStatus, Trial, TrialState
from cloudtrain.runs.checkpoints import SavedCheckpoint
from cloudtrain.runs.downloads import Download
from cloudtrain.runs.file_transfer import CopiedFile
from cloudtrain.runs.history import MetricHistory
from cloudtrain.runs.log_lines import LogLine
from cloudtrain.support.checks import passed
from cloudtrain_runtime.contract.events import EVENTS

REFERENCE = REPOSITORY / "docs" / "reference"
JSON_PAGE = (REFERENCE / "json.md").read_text()
SAMPLES = (
    *("doctor", "explain", "init", "list", "plan", "rehearse", "status", "submit"),
    *("sweep-status", "validate"),
)
FEATURES = ("evaluation", "rehearsal", "serving", "setup", "sweeps")
KEYS = {
    name: re.findall(r"^\| `([^`]+)` \|", table, flags=re.MULTILINE)
    for name, table in re.findall(
        r"<!-- keys: (\w+) -->\n(.*?)\n\n", JSON_PAGE + "\n\n", flags=re.DOTALL
    )
}


@pytest.mark.parametrize(
    "page", ["job-yaml.md", "command-line.md", "events.md", "request.md", "errors.md"]
)
def test_page_is_generated_from_the_code(page: str) -> None:
    """Run `make reference` after a change of a field, a command or an event."""
    assert (REFERENCE / page).read_text() == reference_pages.pages()[REFERENCE / page], (
        "run `make reference`"
    )


def test_every_command_has_a_generated_page() -> None:
    """Run `make reference` after a change of a command, and `make samples` after one of its output."""
    expected = command_pages.command_pages()
    assert set(expected) == set(command_pages.PAGES.glob("*.md"))
    for page, text in expected.items():
        assert page.read_text() == text, "run `make reference`"


@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_of_the_output_is_shown(name: str) -> None:
    sample = (command_samples.SAMPLES / f"{name}.txt").read_text()
    words = name.split("-")
    assert sample.startswith(f"$ cloudtrain {' '.join(words)}")
    assert sample.rstrip() in (command_pages.PAGES / f"{words[0]}.md").read_text()
    # Nothing of the machine that recorded it.
    assert tempfile.gettempdir() not in sample
    assert "\x1b" not in sample


def test_schema_command_prints_the_reference(cli: Cli) -> None:
    assert (
        cli("schema", "--reference").out.strip() == (REFERENCE / "job-yaml.md").read_text().strip()
    )


def test_every_event_has_a_meaning() -> None:
    assert sorted(reference_pages.EVENT_MEANINGS) == sorted(EVENTS)


def test_every_public_name_is_documented() -> None:
    text = (REFERENCE / "python.md").read_text()
    documented = re.findall(r"auto\w+:: cloudtrain\.(\w+)$", text, flags=re.MULTILINE)
    assert sorted([*documented, *FEATURES]) == sorted(cloudtrain.__all__)


def test_every_name_of_the_runtime_is_documented() -> None:
    text = (REFERENCE / "runtime.md").read_text()
    documented = re.findall(r"auto\w+:: cloudtrain_runtime\.(?:process\.)?(\w+)", text)
    assert sorted(set(documented)) == sorted(cloudtrain_runtime.__all__)


@pytest.mark.parametrize("module", FEATURES)
def test_every_name_of_a_feature_is_documented(module: str) -> None:
    text = (REFERENCE / "python.md").read_text()
    documented = re.findall(rf"auto\w+:: cloudtrain\.{module}\.(\w+)", text)
    assert sorted(set(documented)) == getattr(cloudtrain, module).__all__


def check_keys(documented: list[str], value: Mapping[str, Any]) -> None:
    """Fail unless the documented keys are exactly the object's."""
    tops = {key.partition(".")[0].removesuffix("[]") for key in documented}
    assert tops == set(value)
    for top in tops:
        below = [key.partition(".")[2] for key in documented if re.match(rf"{top}(\[\])?\.", key)]
        if below:
            items = (
                value[top]
                if f"{top}[]" in {key.partition(".")[0] for key in documented}
                else [value[top]]
            )
            assert items, f"{top} is empty, so nothing is compared"
            for item in items:
                check_keys(below, item)


def test_keys_of_command_output_are_documented(cli: Cli, tmp_path: Path) -> None:
    job = EXAMPLES / "digits" / "job.yaml"
    bad = tmp_path / "job.yaml"
    bad.write_text("name: digits\ncluster: {instance_type: ml.p4d.24xlarge, instnces: 2}\n")
    check_keys(KEYS["error"], cli("plan", tmp_path / "missing.yaml", "--json").json)
    check_keys(KEYS["validate"], cli("validate", bad, "--json").json)
    check_keys(KEYS["plan"], cli("plan", job, "--region", "us-west-2", "--json").json)
    check_keys(KEYS["files"], cli("files", job, "--json").json)


def test_keys_of_records_are_documented() -> None:
    check_keys(KEYS["check"], {"checks": [passed("quota", "enough").to_json()]})
    status = Status("digits-1", "local", State.RUNNING)
    check_keys(KEYS["status"], status.to_json())
    check_keys(KEYS["explain"], Explanation("digits-1", State.FAILED, None, "").to_json())
    check_keys(KEYS["metrics"], MetricHistory().to_json("digits-1"))
    saved = SavedCheckpoint(100, "step-00000100", "s3://bucket/prefix", "complete", "", 1, 1)
    check_keys(KEYS["checkpoints"], {"checkpoints": [saved.to_json()]})
    copied = CopiedFile("model.tar.gz", 1, "00", "md5", is_new=True)
    check_keys(
        KEYS["download"], Download("digits-1", Path("digits-1"), (copied,), {}, {}).to_json()
    )


def test_keys_of_sweeps_are_documented(cli: Cli) -> None:
    trial = Trial(0, {"train.epochs": 1}, TrialState.SUCCEEDED, objective=1.0)
    found = SweepStatus(
        "s-1",
        SweepState.RUNNING,
        "",
        "optuna",
        "local",
        "test/loss",
        False,
        (trial,),
        1,
        Budget(None),
    )
    check_keys(KEYS["sweep"], found.to_json())
    check_keys(
        KEYS["sweep_plan"],
        cli("sweep", "plan", EXAMPLES / "sweep-digits" / "sweep.yaml", "--json").json,
    )
    states = {
        *re.findall(
            r"\b[A-Z]{4,}\b",
            JSON_PAGE.partition("A sweep is RUNNING")[2].partition("`sweep best`")[0],
        )
    }
    assert {"RUNNING"} | states == {*map(str, SweepState), *map(str, TrialState)}


def test_keys_of_endpoints_are_documented() -> None:
    settings = Settings(role="arn:aws:iam::123456789012:role/r", bucket="b", region="us-west-2")
    found = make_requests("run", "s3://b/model.tar.gz", "0", EndpointOptions(), settings)
    check_keys(KEYS["deploy"], Deployment("run", "sandbox", found, None).to_json())
    listed = Endpoint(
        "run", "sandbox", "InService", "", None, datetime.now(UTC), None, is_idle=False
    )
    check_keys(KEYS["endpoints"], {"endpoints": [listed.to_json()]})


def test_keys_of_logs_are_documented(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [LogLine("algo-1", "a line", None)]
    print_logs_json(Run("digits-1", cast("Any", None)), lines, follow=False)
    check_keys(KEYS["logs"], {**json.loads(capsys.readouterr().out), "error": None})


def test_every_state_is_documented() -> None:
    (row,) = (line for line in JSON_PAGE.splitlines() if line.startswith("| `state` | `"))
    assert re.findall(r"`([A-Z]+)`", row) == list(State)
