"""A plan is refused exactly if its request breaks a limit of AWS's model.

The tests read the limits with botocore's own classes, independently of the product.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import unicodedata
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import botocore
import botocore.session
import pytest
from botocore.validate import ParamValidator
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from support.jobs import Cli
from support.sizes import tries

from cloudtrain.backends.sagemaker.target import SageMakerTarget
from cloudtrain.catalog import bundled_prices, service_limits
from cloudtrain.errors import Problem, SpecError
from cloudtrain.job.spec import JobSpec
from cloudtrain.planning.plan import CodeInfo
from cloudtrain.planning.planner import make_plan
from cloudtrain.settings.settings import Settings

INPUT = (
    botocore.session.get_session()
    .get_service_model("sagemaker")
    .operation_model("CreateTrainingJob")
    .input_shape
)
ACCOUNT = Settings(
    role="arn:aws:iam::123456789012:role/training", bucket="bucket", region="us-west-2"
)
NOW = datetime(2026, 11, 20, 10, 15, 0, tzinfo=UTC)
ECR = "123456789012.dkr.ecr.us-west-2.amazonaws.com"
SETS = {"L": "\\p{L}", "Z": "\\p{Z}", "N": "\\p{N}"}


def matches(pattern: str, text: str) -> bool:
    """Return whether a text matches a pattern of AWS.

    Each pattern with Unicode categories is one repeated set, so its characters are checked one by one.
    """
    if "\\p{L}" not in pattern:
        return re.fullmatch(pattern, text) is not None
    return all(unicodedata.category(char)[0] in SETS or char in "_.:/=+-@" for char in text)


def broken(value: Any, shape: Any, path: str = "") -> Iterator[str]:
    """Yield the places of a request that break a limit."""
    if shape.type_name != "structure":
        size = len(value) if hasattr(value, "__len__") else value
        if not shape.metadata.get("min", size) <= size <= shape.metadata.get("max", size):
            yield path
    for name, inner, below in parts(value, shape):
        yield from broken(inner, below, f"{path}.{name}")
    if shape.type_name == "string":
        pattern = shape.metadata.get("pattern")
        if (pattern and not matches(pattern, value)) or (shape.enum and value not in shape.enum):
            yield path


def parts(value: Any, shape: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, value and shape of everything directly below a value."""
    if shape.type_name == "structure":
        yield from ((name, inner, shape.members[name]) for name, inner in value.items())
    elif shape.type_name == "list":
        yield from ((str(index), inner, shape.member) for index, inner in enumerate(value))
    elif shape.type_name == "map":
        yield from ((f"{key}(key)", key, shape.key) for key in value)
        yield from ((key, inner, shape.value) for key, inner in value.items())


def around(*bounds: int) -> st.SearchStrategy[int]:
    """Generate numbers at, below and above each bound."""
    return st.sampled_from(
        sorted({max(bound + step, 1) for bound in bounds for step in (-1, 0, 1)})
    )


TEXT = st.text(max_size=12) | around(256, 512).map(lambda size: "x" * size)
ODD = ["A", "MY_VAR", "MY-VAR", "1A", "train", "my data", "x" * 65, "ünï", "a/b"]
CHARACTERS = st.characters(codec="utf-8", exclude_characters="\x00")
NAMES = st.text(alphabet=CHARACTERS, min_size=1, max_size=6) | st.sampled_from(ODD)
MANY = st.sampled_from([0, 1, 2, 3] * 5 + [16, 17, 18, 48, 49, 50, 99, 100, 101])
FEW_OR_ODD = [0, 0, 0, 1, 2]
"""Number of oddly named entries in a mapping. It is mostly zero, so that many jobs break no limit."""


def odd(draw: st.DrawFn, values: st.SearchStrategy[str]) -> dict[str, str]:
    return draw(st.dictionaries(NAMES, values, max_size=draw(st.sampled_from(FEW_OR_ODD))))


def filled(prefix: str, names: dict[str, Any], count: int, value: Any) -> dict[str, Any]:
    return {**{f"{prefix}{n}": value for n in range(count)}, **names}


@st.composite
def jobs(draw: st.DrawFn) -> dict[str, Any]:
    """Generate jobs that the spec allows, often with values that AWS does not allow."""
    few = st.sampled_from(
        ["subnet-1", "sg-1", "subnet-0123456789abcdef0", "sg-2", "sg-3", "x" * 33, "with space"]
    )
    spot = draw(st.booleans())
    cluster: dict[str, Any] = {
        "instance_type": draw(st.sampled_from(["ml.p4d.24xlarge", "ml.g5.xlarge", "ml.m5.xlarge"])),
        "instances": draw(st.integers(1, 200)),
        "volume": f"{draw(st.integers(1, 20000))}GB",
        "spot": {} if spot else None,
        "max_pending": draw(
            st.none() | st.none() | around(1800, 2419200).map(lambda seconds: f"{seconds}s")
        ),
        "keep_alive": None
        if spot
        else draw(st.none() | st.none() | around(60, 21600).map(lambda seconds: f"{seconds}s")),
        "image": draw(
            st.none()
            | st.none()
            | st.just(f"{ECR}/mine:1")
            | around(255).map(lambda n: f"{ECR}/".ljust(n, "i"))
        ),
    }
    if draw(st.booleans()):
        cluster["network"] = {
            "subnets": draw(st.lists(few, min_size=1, max_size=draw(st.sampled_from([2, 2, 17])))),
            "security_groups": draw(
                st.lists(few, min_size=1, max_size=draw(st.sampled_from([2, 2, 6])))
            ),
        }
    if not spot and draw(st.booleans()):
        names = [
            "ml.p4d.24xlarge",
            "ml.p5.48xlarge",
            "ml.p5e.48xlarge",
            "ml.p5en.48xlarge",
            "ml.p4de.24xlarge",
        ]
        del cluster["instance_type"]
        cluster["prefer"] = draw(st.permutations([*names, "ml.p3.16xlarge"]))[
            : draw(st.integers(1, 6))
        ]
    uris = around(3, 5, 7, 1012, 1024).map(lambda size: "s3://bucket/" + "k" * size)
    return {
        "name": draw(st.from_regex(r"[a-z]{1,42}", fullmatch=True)),
        "code": {
            "script": "train.py",
            "env": filled("V", odd(draw, TEXT), draw(MANY), "x"),
        },
        "cluster": cluster,
        "data": filled("c", odd(draw, uris), draw(MANY), "s3://bucket/x"),
        "limits": {"retries": draw(st.integers(0, 32))},
        "tags": filled("t", odd(draw, TEXT), draw(MANY), "x"),
    }


def request_of(job: dict[str, Any]) -> dict[str, Any]:
    target = SageMakerTarget(ACCOUNT, bundled_prices())
    return make_plan(
        JobSpec(**job), CodeInfo("d" * 64, 1000, 3), target, now=NOW, suffix="1a2b3c"
    ).request


@given(job=jobs())
@settings(
    max_examples=tries(300),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
def test_plan_is_refused_exactly_when_a_limit_is_broken(job: dict[str, Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(service_limits, "check_request", lambda request: [])
        try:
            request = request_of(job)
        except SpecError:
            event("refused by a rule of our own")
            return
    too_much = list(broken(request, INPUT))
    event("breaks a limit" if too_much else "breaks none")
    problems: tuple[Problem, ...] = ()
    try:
        assert request_of(job) == request
    except SpecError as error:
        problems = error.problems
    assert bool(problems) == bool(too_much), (problems, too_much)
    assert all(problem.path and problem.hint for problem in problems)
    assert too_much or not ParamValidator().validate(request, INPUT).has_errors()


def test_the_limits_come_from_the_installed_model() -> None:
    pending = INPUT.members["StoppingCondition"].members["MaxPendingTimeInSeconds"].metadata
    assert {
        name: service_limits.limit_of("StoppingCondition", "MaxPendingTimeInSeconds")[name]
        for name in ("min", "max")
    } == pending
    assert service_limits.instance_types() == set(
        INPUT.members["ResourceConfig"].members["InstanceType"].enum
    )
    assert service_limits.regions() >= {"us-west-2", "cn-north-1", "us-gov-west-1"}


def write_botocore(folder: Path, retries: int) -> None:
    """Write a package `botocore` that has the installed model, but another limit of retries."""
    model = Path("sagemaker", "2017-07-24", "service-2.json")
    installed, data = Path(botocore.__file__).parent / "data", folder / "botocore" / "data"
    (data / model).parent.mkdir(parents=True)
    (data.parent / "__init__.py").write_text("")
    shutil.copy(installed / "partitions.json", data)
    document = json.loads(gzip.decompress((installed / f"{model}.gz").read_bytes()))
    document["shapes"]["MaximumRetryAttempts"]["max"] = retries
    (data / model).write_text(json.dumps(document))


def test_an_upgrade_of_botocore_moves_the_limits(
    cli_process: Cli, job: Callable[..., Path], tmp_path: Path
) -> None:
    text = "name: demo\ncode: {script: train.py}\ncluster: {instance_type: ml.g5.xlarge}\nlimits: {retries: 31}\n"
    path = job(text, train_py="")
    assert "limits.retries: AWS allows at most 30, got 31" in cli_process("plan", path).err
    write_botocore(tmp_path / "newer", retries=31)
    environ = {"PYTHONPATH": os.pathsep.join([str(tmp_path / "newer"), os.environ["PYTHONPATH"]])}
    assert cli_process("plan", path, "--request", environ=environ).json["RetryStrategy"] == {
        "MaximumRetryAttempts": 31
    }


def test_the_longest_name_leaves_room_for_the_run_id() -> None:
    longest = INPUT.members["TrainingJobName"].metadata["max"]
    from cloudtrain.job.job_fields import MAX_NAME_CHARACTERS
    from cloudtrain.support.run_id import RUN_ID_CHARACTERS

    assert longest == RUN_ID_CHARACTERS == MAX_NAME_CHARACTERS + len("-261120-101500-1a2b3c")


def read_limit(cache: Path) -> dict[str, Any]:
    """Read a limit in a new process, which has no limits in memory."""
    code = (
        "import json; from cloudtrain.catalog.service_limits import limit_of; "
        "print(json.dumps(limit_of('StoppingCondition', 'MaxPendingTimeInSeconds')))"
    )
    environ = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
    )
    limit: dict[str, Any] = json.loads(done.stdout)
    return limit


def test_damaged_cache_of_limits_is_rebuilt_from_the_model(tmp_path: Path) -> None:
    limit = read_limit(tmp_path)
    assert (
        limit.items()
        >= INPUT.members["StoppingCondition"].members["MaxPendingTimeInSeconds"].metadata.items()
    )
    (cache,) = (tmp_path / "cloudtrain").iterdir()
    content = cache.read_text()
    assert read_limit(tmp_path) == limit
    for damaged in ("", "[1]", "{}", '"x"'):
        cache.write_text(damaged)
        assert read_limit(tmp_path) == limit
        assert cache.read_text() == content
    assert read_limit(Path("/dev/null")) == limit


def test_botocore_is_not_imported() -> None:
    code = (
        "import sys; from cloudtrain.catalog import service_limits; from cloudtrain.client import shortcuts; "
        "service_limits.instance_types(); print('botocore' in sys.modules)"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "False\n"
    )
