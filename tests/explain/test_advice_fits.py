"""No advice names a field, an option or a command that the job or the place of its run does not have."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from support.plans import SETTINGS

import cloudtrain
from cloudtrain.cli import cli
from cloudtrain.failure_rules import explain_run
from cloudtrain.failure_rules.rules import RULES, Jobs, Places, advice_for
from cloudtrain.job.spec import load_job
from cloudtrain.runs.log_lines import LogLine
from cloudtrain.runs.status import State, Status

ENTRIES = {
    Jobs.TASK: ("task", "train:Mine"),
    Jobs.SCRIPT: ("script", "train.py"),
    Jobs.MODULE: ("module", "train"),
    Jobs.COMMAND: ("command", "[python, train.py]"),
}
BACKENDS = {Places.HERE: "local", Places.SIMULATION: "sandbox", Places.CLOUD: "sagemaker"}
FIELD = re.compile(
    r"(?<![\w./])(?:train|code|cluster|checkpoint|limits)(?!\.py\b)(?:\.[A-Za-z_][A-Za-z_0-9]*)+"
)
VALUES = {
    "train.batch_size": "1",
    "train.accumulate": "2",
    "train.drop_last": "true",
    "train.parallel.find_unused": "true",
    "train.precision": "bf16",
    "train.workers": "0",
    "train.parallel.data": "fsdp",
    "code.task": "train:Mine",
    "code.script": "train.py",
    "code.module": "train",
    "code.command": "[python, train.py]",
    "code.args": "{}",
    "code.requirements": "requirements.txt",
    "code.env": "{PYTHONPATH: .}",
    "code.env.CUDA_LAUNCH_BLOCKING": "1",
    "code.env.FI_EFA_USE_DEVICE_RDMA": "0",
    "code.env.HF_HOME": "/opt/ml/hub",
    "code.env.NCCL_DEBUG": "INFO",
    "code.env.NCCL_P2P_DISABLE": "1",
    "code.env.NCCL_SHM_DISABLE": "1",
    "code.env.PIP_INDEX_URL": "https://index.example.com/simple",
    "code.env.WANDB_API_KEY": "{secret: wandb-key}",
    "code.env.WANDB_ENTITY": "team",
    "code.env.WANDB_MODE": "offline",
    "code.env.PYTHONFAULTHANDLER": "1",
    "code.env.PYTHONUTF8": "1",
    "code.env.AWS_MAX_ATTEMPTS": "10",
    "cluster.instance_type": "ml.g5.xlarge",
    "cluster.instances": "1",
    "cluster.prefer": "[ml.g5.xlarge]",
    "cluster.max_pending": "6h",
    "cluster.processes_per_instance": "1",
    "cluster.framework": "2.13",
    "cluster.image": "123456789012.dkr.ecr.us-west-2.amazonaws.com/train:1",
    "cluster.volume": "50GB",
    "cluster.spot": "true",
    "cluster.spot.max_wait": "30h",
    "cluster.network.subnets": "[subnet-1]",
    "cluster.network.security_groups": "[sg-1]",
    "cluster.network.isolation": "false",
    "checkpoint.keep": "2",
    "checkpoint.resume": "never",
    "checkpoint.uri": "s3://bucket/checkpoints",
    "limits.hang": "20m",
    "limits.runtime": "30h",
}
"""A value for each field that an advice names."""
NEEDED_TOGETHER = {
    "cluster.prefer": "cluster.instance_type=null",
    "cluster.network.subnets": "cluster.network.security_groups=[sg-1]",
    "cluster.network.security_groups": "cluster.network.subnets=[subnet-1]",
}
NOT_USED = {
    Places.HERE: r"cluster\.(instance_type|prefer|max_pending|spot|framework|image|volume|network)",
    Places.SIMULATION: r"cluster\.(framework|volume|network)",
    Places.CLOUD: r"$^",
}
"""Fields that a run there does not use."""
WORDS_OF_OTHERS = {
    Jobs.TASK: r"\bscript|num_workers|collate_fn|DataLoader is created|Lightning|find_unused_par",
    Jobs.PROGRAM: r"\bTask\b|datasets\(\)|model\(\)|loss\(\)|collate\(\)|context\(\)",
}
ABSENT_HERE = (
    r"\brole\b|cloudtrain check|submit JOB --local|submit --local(?! --cuda)|output\.tar\.gz"
)
RUNS = list(itertools.product(ENTRIES, BACKENDS))
ERRORS = [
    "ModuleNotFoundError: No module named 'sklearn'",
    "FileNotFoundError: [Errno 2] No such file or directory: '/opt/ml/input/data/train/x.csv'",
    "FileNotFoundError: [Errno 2] No such file or directory: 'vocab.json'",
    "RuntimeError: Found no NVIDIA driver on your system.",
    "ValueError: 3",
]
ENDS = {
    State.STOPPED: ["stopped by request", "MaxRuntimeExceeded", "SIGTERM"],
    State.FAILED: ["unknown", "No space left on device"],
}


def name_of(value: object) -> str:
    return str(value).rpartition(".")[2].lower()


@pytest.fixture
def job_of(tmp_path: Path) -> dict[Jobs, Path]:
    """A job file of each kind."""
    (tmp_path / "train.py").write_text(
        "from cloudtrain_runtime import Task\n\n\nclass Mine(Task):\n"
        "    def model(self): ...\n    def datasets(self): ...\n    def loss(self, model, batch): ...\n"
    )
    (tmp_path / "requirements.txt").write_text("einops\n")
    found = {}
    for kind, (field, value) in ENTRIES.items():
        text = f"name: demo\ncode: {{{field}: {value!r}}}\n".replace("'[", "[").replace("]'", "]")
        text += "cluster: {instance_type: ml.m5.large}\n"
        text += "train: {epochs: 1, batch_size: 4}\n" if kind is Jobs.TASK else ""
        found[kind] = tmp_path / f"{field}.yaml"
        found[kind].write_text(text)
    return found


def facts_of(kind: Jobs) -> dict[str, str]:
    field, value = ENTRIES[kind]
    return {f"code.{field}": value, "role": "training", "cluster.instance_type": "ml.m5.large"}


def mistakes(text: str, job: Path, kind: Jobs, place: Places) -> Iterator[str]:
    """Yield what in an advice does not fit a job of a kind that ran in a place."""
    if not text.endswith(".") or re.search(r"  | [,.;:]|\[|\]", text):
        yield "is no sentence"
    for field in set(FIELD.findall(text)):
        if re.match(NOT_USED[place], field):
            yield f"{field} is not used there"
        if field not in VALUES:
            yield f"{field} has no value in this test"
            continue
        others = [NEEDED_TOGETHER[field]] if field in NEEDED_TOGETHER else []
        loaded = load_job(job, [f"{field}={VALUES[field]}", *others])
        yield from (f"{field}: {problem.message}" for problem in loaded.problems)
    for name in re.findall(r"cloudtrain ([a-z]+)\b(?! entrypoint)", text):
        if cli.get_command(click.Context(cli), name) is None:
            yield f"there is no command {name}"
    others = WORDS_OF_OTHERS[Jobs.TASK if kind is Jobs.TASK else Jobs.PROGRAM]
    if found := re.search(others, text):
        yield f"{found[0]} is for other jobs"
    if place is Places.HERE and (found := re.search(ABSENT_HERE, text)):
        yield f"{found[0]} is not for a local run"


@pytest.mark.parametrize(("kind", "place"), RUNS, ids=name_of)
def test_the_rules_fit_the_job(job_of: dict[Jobs, Path], kind: Jobs, place: Places) -> None:
    wrong = []
    for text in {advice_for(rule.action, kind, place) for rule in RULES}:
        plain = re.sub(r"\[([a-z_]+(?:\.[a-z_]+)*)\]", r"\1", text)
        wrong += [f"{each}: {text}" for each in mistakes(plain, job_of[kind], kind, place)]
    assert wrong == []


@pytest.mark.parametrize(("kind", "place"), RUNS, ids=name_of)
def test_explanations_fit_the_job(job_of: dict[Jobs, Path], kind: Jobs, place: Places) -> None:
    facts, backend = facts_of(kind), BACKENDS[place]
    runs = [(Status("r", backend, state, reason), []) for state in ENDS for reason in ENDS[state]]
    for error in ERRORS:
        lines = [
            "Traceback (most recent call last):",
            '  File "/opt/ml/code/train.py", line 3, in <module>',
            error,
        ]
        read = [LogLine("algo-1", line) for line in lines]
        runs.append((Status("r", backend, State.FAILED), read))
    for status, log in runs:
        action = explain_run(status, log, facts).action
        if action:
            found = list(mistakes(action, job_of[kind], kind, place))
            # Values of the job are in parentheses behind their field.
            assert found == [], (action, found)


@pytest.mark.parametrize("kind", ENTRIES, ids=name_of)
@pytest.mark.parametrize("local", [True, False])
def test_warnings_of_plans_fit_the_job(
    job_of: dict[Jobs, Path], kind: Jobs, *, local: bool
) -> None:
    plan = cloudtrain.plan(job_of[kind], local=local, settings=SETTINGS)
    for text in plan.warnings:
        for field in set(FIELD.findall(text)) & VALUES.keys():
            assert load_job(job_of[kind], [f"{field}={VALUES[field]}"]).problems == (), text


def test_a_field_of_a_task_is_none_of_a_script(job_of: dict[Jobs, Path]) -> None:
    """Otherwise these tests prove nothing."""
    text = "Halve train.batch_size."
    assert list(mistakes(text, job_of[Jobs.TASK], Jobs.TASK, Places.HERE)) == []
    for kind in (Jobs.SCRIPT, Jobs.MODULE, Jobs.COMMAND):
        assert list(mistakes(text, job_of[kind], kind, Places.HERE))
    assert list(mistakes("Raise cluster.volume.", job_of[Jobs.TASK], Jobs.TASK, Places.HERE))
