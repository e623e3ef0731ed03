"""The guide's job file is one, and its weather is: every field of them validates, and every field is in them."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel
from support.jobs import REPOSITORY, Cli

from cloudtrain.backends.sandbox.fault_injection import Weather
from cloudtrain.cli import _COMMANDS
from cloudtrain.cli.checkpoints import checkpoints
from cloudtrain.job.spec import JobSpec

GUIDE = (REPOSITORY / "docs" / "guide.md").read_text()
(JOB, *OTHERS) = re.findall(r"```yaml\n(.*?)```", GUIDE, flags=re.DOTALL)
(WEATHER,) = (block for block in OTHERS if "capacity_after_seconds" in block)
PARTS = [block for block in OTHERS if block != WEATHER]


def test_it_validates_and_plans(cli: Cli, job: Callable[..., Path]) -> None:
    path = job(JOB, gpt_py="class GPT(Task):\n    def __init__(self, layers): ...\n", **{"requirements.txt": "numpy"})
    assert cli("validate", path).err == ""
    assert cli("plan", path, "--region", "us-west-2", "--json").json["batch"]["global"] == 16 * 4 * 16


def test_parts_of_a_job_validate(cli: Cli, job: Callable[..., Path]) -> None:
    for part in PARTS:
        whole = yaml.safe_load(JOB)
        for section, fields_ in yaml.safe_load(part).items():
            whole[section] = {**whole.get(section, {}), **fields_}
        path = job(yaml.safe_dump(whole), gpt_py="class GPT(Task): ...\n", **{"requirements.txt": "numpy"})
        assert cli("validate", path).err == ""


def test_its_weather_has_every_field() -> None:
    document = yaml.safe_load(WEATHER)
    Weather.from_document(document)
    assert list(document) == [field.name for field in dataclasses.fields(Weather)]


def fields(model: Any) -> set[str]:
    names = set()
    for name, field in model.model_fields.items():
        names.add(name)
        for kind in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                names |= fields(kind)
    return names


def test_every_field_is_shown() -> None:
    for name in fields(JobSpec):
        assert re.search(rf"\b{name}:", GUIDE), name


def test_every_command_is_named() -> None:
    documents = GUIDE + (REPOSITORY / "README.md").read_text()
    for name in _COMMANDS:
        assert f"cloudtrain {name}" in documents, name
    for name in checkpoints.commands:
        assert name == "list" or f"cloudtrain checkpoints {name} " in GUIDE, name
