"""Secrets of a job: references are sent, values are refused. Every key in this file is made up."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import jsonschema
import pytest
from support.fake_keys import (
    GITHUB,
    HF,
    KEY,
    KEY_ID,
)
from support.fake_keys import WANDB as WANDB_KEY
from support.jobs import EXAMPLES, Cli

from cloudtrain.backends.local.target import LocalTarget
from cloudtrain.backends.sagemaker.target import SageMakerTarget
from cloudtrain.catalog import bundled_prices
from cloudtrain.errors import SpecError
from cloudtrain.job.schema import job_schema
from cloudtrain.job.sections.code import Code
from cloudtrain.job.spec import JobSpec
from cloudtrain.planning.placement import Machine
from cloudtrain.planning.plan import CodeInfo, Plan
from cloudtrain.planning.planner import make_plan
from cloudtrain.planning.targets import Target
from cloudtrain.settings.settings import Settings
from cloudtrain_runtime.contract import RunConfig, SecretConfig

NOW = datetime(2026, 11, 21, 10, 15, tzinfo=UTC)
JOB = EXAMPLES / "script-ddp" / "job.yaml"
WANDB = "code.env.WANDB_API_KEY={secret: team/wandb, key: api_key}"
ARN = "arn:aws:secretsmanager:eu-west-1:123456789012:secret:team/wandb-AbCdEf"


def plan_of(*overrides: str, variables: frozenset[str] | None = None) -> Plan:
    """Plan the example with overrides, for a local run if `variables` names the variables that are set."""
    code = CodeInfo(digest="0" * 64, bytes=1, files=1)
    settings = Settings(region="us-west-2")
    target: Target = SageMakerTarget(settings, bundled_prices())
    if variables is not None:
        machine = Machine(gpus=0, variables=variables)
        target = LocalTarget(settings, Path("/somewhere/.cloudtrain"), machine)
    return make_plan(JobSpec.from_yaml(JOB, overrides), code, target, now=NOW, suffix="1a2b3c")


def problems_of(*overrides: str) -> list[str]:
    with pytest.raises(SpecError) as found:
        plan_of(*overrides)
    return [
        f"{problem.path}: {problem.message}; {problem.hint}" for problem in found.value.problems
    ]


def test_a_reference_is_in_run_json_and_not_in_the_request() -> None:
    decided = plan_of(
        WANDB, "code.env.HF_TOKEN={secret: " + ARN + ", stage: AWSPREVIOUS}", "code.env.PLAIN=1"
    )
    assert decided.config.secrets == {
        "WANDB_API_KEY": SecretConfig("team/wandb", "api_key"),
        "HF_TOKEN": SecretConfig(ARN, None, "AWSPREVIOUS"),
    }
    assert decided.request["Environment"] == {"PLAIN": "1"}
    assert "wandb" not in json.dumps(decided.request)
    assert RunConfig.from_json(decided.config.to_json()) == decided.config


def test_without_secrets_run_json_is_unchanged() -> None:
    config = plan_of().config
    assert "secrets" not in json.loads(config.to_json())
    assert config.secrets == {}
    assert "secrets" in json.loads(replace(config, secrets={"A": SecretConfig("b")}).to_json())


def test_another_secret_is_another_request() -> None:
    identities = {
        plan_of(*each).identity
        for each in ((), (WANDB,), ("code.env.WANDB_API_KEY={secret: other}",))
    }
    assert len(identities) == 3


def test_a_job_built_in_python_accepts_references() -> None:
    code = Code(script="train.py", env={"A": {"secret": "team/a"}, "B": "2", "C": True})
    assert code.secrets == {"A": SecretConfig("team/a")}
    assert code.variables == {"B": "2", "C": "true"}
    assert code.model_dump(mode="json", exclude_unset=True)["env"] == {
        "A": {"secret": "team/a"},
        "B": "2",
        "C": "true",
    }


def test_the_plan_names_the_secret(cli: Cli) -> None:
    done = cli(
        "plan", JOB, "--set", WANDB, "--local", environ={"WANDB_API_KEY": "0a1b2c3d4e5f6a7b"}
    )
    assert done.code == 0, done.err
    assert "WANDB_API_KEY = secret team/wandb, key api_key" in done.out
    assert (
        "WANDB_API_KEY is set on this machine: its value is used, and the secret team/wandb is not read"
        in done.out
    )
    as_json = cli("plan", JOB, "--set", WANDB, "--json")
    assert as_json.json["secrets"] == {
        "WANDB_API_KEY": {"secret": "team/wandb", "key": "api_key", "stage": None}
    }
    assert "0a1b2c3d" not in done.out + as_json.out


def test_a_local_plan_names_the_variables_that_are_set() -> None:
    assert not [
        line
        for line in plan_of(WANDB, variables=frozenset({"HOME"})).decisions
        if "is set on this machine" in line
    ]
    assert [
        line
        for line in plan_of(WANDB, variables=frozenset({"WANDB_API_KEY"})).decisions
        if "is set on this machine" in line
    ]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("code.env.A={secrt: x}", 'code.env.A.secrt: unknown field; did you mean "secret"?'),
        ("code.env.A={key: x}", "code.env.A.secret: required field is missing"),
        (
            "code.env.A={secret: 'a b'}",
            'code.env.A.secret: expected the name or ARN of a secret, got "a b"',
        ),
        ("code.env.A={secret: x, key: ''}", "code.env.A.key: expected a name, got nothing"),
        ("code.env={'a-b': {secret: x}}", "code.env.a-b: expected the name of a variable"),
        ("code.env.RANK={secret: x}", "code.env.RANK: the launcher sets this variable"),
        ("code.env.A=[1]", "code.env.A: expected text"),
    ],
)
def test_an_invalid_reference_is_reported_with_its_path(override: str, expected: str) -> None:
    assert [line for line in problems_of(override) if line.startswith(expected)], problems_of(
        override
    )


def test_an_isolated_container_cannot_have_secrets() -> None:
    problems = problems_of(WANDB, "cluster.network.isolation=true")
    assert (
        "code.env.WANDB_API_KEY: an isolated container cannot reach Secrets Manager"
        in "\n".join(problems)
    )


def test_the_schema_accepts_both_forms() -> None:
    job = {"name": "a", "code": {"script": "x.py"}, "cluster": {"instance_type": "ml.p4d.24xlarge"}}
    for value, is_legal in (
        ("x", True),
        (1, True),
        ({"secret": "x", "key": "y"}, True),
        ({"key": "y"}, False),
        ([], False),
    ):
        document = {**job, "code": {"script": "x.py", "env": {"A": value}}}
        assert jsonschema.Draft202012Validator(job_schema()).is_valid(document) == is_legal


@pytest.mark.parametrize(
    ("overrides", "place"),
    [
        (["code.env.HF_TOKEN=abcdefgh"], "code.env.HF_TOKEN: looks like a secret"),
        (["code.env.DB_PASSWORD=hunter2"], "code.env.DB_PASSWORD: looks like a secret"),
        (["code.env.MY_API_KEY=0123abcd4567"], "code.env.MY_API_KEY: looks like a secret"),
        (
            [f"code.env.HARMLESS={GITHUB}"],
            "code.env.HARMLESS: contains a value that looks like a secret",
        ),
        (
            [f"code.env.URL=https://ada:{HF}@example.com"],
            "code.env.URL: contains a value that looks like a secret",
        ),
        (["code.args={layers: 4, api_key: abcdefgh}"], "code.args.api_key: looks like a secret"),
        (
            [f"code.args={{note: '{KEY_ID}'}}"],
            "code.args.note: contains a value that looks like a secret",
        ),
        (["code.args=[--api-key, abcdefgh]"], "code.args[1]: "),
        (["code.args=[--password=abcdefgh]"], "code.args[0]: "),
        ([f"tags.note={HF}"], "tags.note: contains a value that looks like a secret"),
        (["tags.password=hunter2hunter2"], "tags.password: looks like a secret"),
        *(
            ([f"code.env.{name}={value}"], f"code.env.{name}: looks like a secret")
            for name, value in (
                *(
                    (name, "hunter2")
                    for name in ("PGPASSWORD", "MYSQL_PWD", "DBPASSWORD", "SSHPASS", "DB_PASS")
                ),
                *((name, WANDB_KEY) for name in ("REDISCLI_AUTH", "WANDB_KEY", "HFTOKEN")),
                *((name, KEY) for name in ("SIGNING_KEY", "OPENAI_KEY", "MYAPIKEY")),
                ("AWS_SECRET_ACCESS_KEY", f"/{KEY[1:]}"),
                ("DB_PASSWORD", "8675309123"),
                ("STORAGE", f"'DefaultEndpointsProtocol=https;AccountName=ada;AccountKey={KEY}=='"),
            )
        ),
    ],
)
def test_a_value_that_looks_like_a_secret_is_refused(overrides: list[str], place: str) -> None:
    problems = [line for line in problems_of(*overrides) if line.startswith(place)]
    assert problems
    assert "{secret: <its name or ARN>}" in problems[0]
    assert not [line for line in problems if GITHUB in line or HF in line or KEY_ID in line]


@pytest.mark.parametrize(
    "override",
    [
        *(
            "code.env.TOKENIZERS_PARALLELISM=false",
            "code.env.HF_TOKEN=''",
            "code.env.MAX_TOKEN=4096",
        ),
        *(
            "code.env.HF_TOKEN_PATH=/opt/ml/input/data/token/file",
            "code.env.SECRET_TOKEN=/run/secrets/token",
        ),
        *(
            "code.args={pad_token: '<pad-token>', max_tokens: 2048, token: special}",
            "code.args={token_dim: 64}",
        ),
        *(
            "code.env.SORT_KEY=created_at_2024_and_later",
            "code.env.S3_KEY=models/bert-base-uncased/v12.bin",
        ),
        *(
            "code.env.COMPASS=northwest",
            "code.env.PWD=/opt/ml/code",
            "code.env.GRPC_AUTH=insecure-2",
        ),
        *(
            "tags.commit=0123456789abcdef0123456789abcdef01234567",
            "data.more=s3://bucket/secret/password",
        ),
        WANDB,
    ],
)
def test_harmless_values_are_accepted(override: str) -> None:
    plan_of(override)


def test_a_refusal_names_line_and_column(job: Callable[..., Path], cli: Cli) -> None:
    text = "name: a\ncode:\n  script: train.py\n  env:\n    HF_TOKEN: hunter2hunter2\n"
    done = cli("validate", job(text + "cluster: {instance_type: ml.m5.large}\n", train_py=""))
    assert done.code == 2
    assert (
        "job.yaml:5:15  code.env.HF_TOKEN: looks like a secret, and everyone who may describe the job can"
        in done.err
    )
    assert "hunter2" not in done.err
