"""`cloudtrain schema` prints a JSON Schema that accepts and refuses the same files as `cloudtrain validate`."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from support.jobs import EXAMPLES, REPOSITORY, Cli

from cloudtrain.errors import SpecError
from cloudtrain.job.document import parse_document
from cloudtrain.job.schema import DIALECT, job_schema
from cloudtrain.job.spec import JobSpec

SCHEMA = job_schema()
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
GOOD = """\
name: demo
code: {task: "mine:Mine"}
cluster: {instance_type: ml.p4d.24xlarge, instances: 2, spot: {max_wait: 36h}, volume: 200GB}
data: {train: s3://bucket/train, labels: {uri: s3://bucket/labels, mode: FastFile}}
train: {epochs: 3, evaluate: {every: 200 steps}}
checkpoint: {every: 500 steps}
limits: {runtime: 10h, cost: 500 USD}
"""


def errors(text: str) -> list[str]:
    return [error.json_path for error in VALIDATOR.iter_errors(yaml.safe_load(text))]


def test_the_schema_has_the_documented_draft(cli: Cli) -> None:
    printed = cli("schema").json
    assert printed == SCHEMA
    assert printed["$schema"] == DIALECT
    jsonschema.Draft202012Validator.check_schema(printed)


@pytest.mark.parametrize(
    "path", sorted(EXAMPLES.glob("*/job.yaml")), ids=lambda path: path.parent.name
)
def test_every_example_is_valid(path: Path) -> None:
    assert errors(path.read_text()) == []


def test_full_job_of_the_docs_is_valid() -> None:
    page = (REPOSITORY / "docs" / "how-to" / "job-file.md").read_text()
    for text in re.findall(r"```yaml\n(name:.*?)```", page, flags=re.DOTALL):
        assert errors(text) == []


def test_examples_and_defaults_are_valid_for_their_field() -> None:
    def check(section: dict[str, Any]) -> int:
        count = 0
        for name, content in section["properties"].items():
            validator = VALIDATOR.evolve(schema={**content, "$defs": SCHEMA["$defs"]})
            defaults = [content["default"]] if content.get("default") is not None else []
            for value in [*content.get("examples", []), *defaults]:
                if isinstance(value, dict) and not value.keys() & {
                    "task",
                    "script",
                    "instance_type",
                }:
                    continue  # a section's defaults: each of its fields is checked by itself
                assert list(validator.iter_errors(value)) == [], (name, value)
                count += 1
        return count

    assert sum(map(check, [SCHEMA, *SCHEMA["$defs"].values()])) > 100


def test_every_field_has_a_description() -> None:
    for section in [SCHEMA, *SCHEMA["$defs"].values()]:
        assert section["description"]
        assert all(content["description"] for content in section["properties"].values())


@pytest.mark.parametrize(
    ("old", "new", "path"),
    [
        ("name: demo", "name: my_job", "$.name"),
        ("instances: 2", "instnces: 2", "$.cluster"),
        ("instances: 2", "instances: two", "$.cluster.instances"),
        ("instances: 2", "instances: 0", "$.cluster.instances"),
        ("ml.p4d.24xlarge", "p4d.24xlarge", "$.cluster.instance_type"),
        ("max_wait: 36h", "max_wait: 36", "$.cluster.spot"),
        ("volume: 200GB", "volume: 200", "$.cluster.volume"),
        ("mine:Mine", "mine.py", "$.code.task"),
        ('task: "mine:Mine"', 'task: "mine:Mine", script: train.py', "$.code"),
        ("epochs: 3", "epochs: 3, steps: 5", "$.train"),
        ("epochs: 3", "epochs: three", "$.train"),
        ("epochs: 3", "epochs: 3, precision: bf61", "$.train"),
        ("every: 200 steps", "every: 10m", "$.train"),
        ("mode: FastFile", "mode: Fast", "$.data.labels"),
        ("500 USD", "500", "$.limits.cost"),
        ("every: 500 steps", "every: often", "$.checkpoint.every"),
        ("runtime: 10h", "runtime: 10h, hang: 600", "$.limits.hang"),
        ("runtime: 10h", "runtime: 10h, retries: 31", "$.limits.retries"),
    ],
)
def test_a_broken_file_is_refused_by_the_schema_and_by_validate(
    job: Callable[..., Path], old: str, new: str, path: str
) -> None:
    broken = GOOD.replace(old, new)
    assert broken != GOOD
    assert errors(GOOD) == []
    assert [place for place in errors(broken) if place.startswith(path)] != []
    if "retries" not in new:  # a limit of AWS, which only the plan checks
        with pytest.raises(SpecError):
            JobSpec.from_yaml(job(broken, mine_py="class Mine(Task): ...\n", train_py=""))


def test_yaml_1_1_reads_the_same_values() -> None:
    """Editors apply the schema to what YAML 1.1 reads; cloudtrain reads YAML 1.2."""
    assert json.dumps(parse_document(GOOD, "job.yaml").data) == json.dumps(yaml.safe_load(GOOD))
