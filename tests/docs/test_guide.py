"""The guide's job file is one: every field of it validates, and every field is in it."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from support import REPOSITORY, Cli

from cloudtrain.spec import JobSpec

GUIDE = (REPOSITORY / "docs" / "guide.md").read_text()
(JOB,) = re.findall(r"```yaml\n(.*?)```", GUIDE, flags=re.DOTALL)


def test_it_validates_and_plans(cli: Cli, job: Callable[..., Path]) -> None:
    path = job(JOB, gpt_py="class GPT:\n    def __init__(self, layers): ...\n", **{"requirements.txt": "numpy"})
    assert cli("validate", path).err == ""
    assert cli("plan", path, "--region", "us-west-2", "--json").json["batch"]["global"] == 16 * 4 * 16


def fields(model: Any) -> set[str]:
    names = set()
    for name, field in model.model_fields.items():
        names.add(name)
        for kind in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                names |= fields(kind)
    return names


def test_every_field_is_shown() -> None:
    not_there_yet = {
        "parallel",
        "data",
        "tensor",
        "pipeline",
        "profile",
        "at",
        "steps",
        "tracking",
        "tensorboard",
        "mlflow",
    }
    for name in fields(JobSpec) - not_there_yet:
        assert re.search(rf"\b{name}:", GUIDE), name
