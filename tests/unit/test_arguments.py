"""`code.args`: the argv of a script, refused values, and what a plan shows."""

import json
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
from support.jobs import Cli

from cloudtrain.backends.sagemaker.target import SageMakerTarget
from cloudtrain.catalog import bundled_prices
from cloudtrain.console.plans import print_plan
from cloudtrain.errors import SpecError
from cloudtrain.job.arguments import script_argv
from cloudtrain.job.sections.code import Code
from cloudtrain.job.spec import JobSpec, load_job_document
from cloudtrain.job.static_analysis.conventions import ScriptConventions
from cloudtrain.planning.plan import CodeInfo, Plan
from cloudtrain.planning.planner import make_plan
from cloudtrain.settings.settings import Settings

WriteJob = Callable[..., Path]
SCRIPT = """\
name: demo
code:
  script: train.py
  args: {seed: 0, dropout: 0.0, workers: 0, lr: 1e-4, id: 007, amp: true, bf16: "False", note: "", warmup: null}
cluster: {instance_type: ml.p4d.24xlarge}
"""
ARGV = [
    *("--seed", "0", "--dropout", "0.0", "--workers", "0", "--lr", "1e-4", "--id", "007", "--amp"),
    *("--bf16", "False", "--note", ""),
]
COMMAND = "python train.py --seed 0 --dropout 0.0 --workers 0 --lr 1e-4 --id 007 --amp --bf16 False --note ''"
MINE = "class Mine(Task):\n    def __init__(self, layers=2, bias=True, name=None): ...\n"


def plan_of(
    path: Path,
    *overrides: str,
    conventions: ScriptConventions = ScriptConventions(),  # noqa: B008
) -> Plan:
    code = CodeInfo("d" * 64, 1000, 3, conventions=conventions)
    settings = Settings(
        role="arn:aws:iam::123456789012:role/training", bucket="bucket", region="us-west-2"
    )
    now = datetime(2026, 11, 20, 10, 15, tzinfo=UTC)
    target = SageMakerTarget(settings, bundled_prices())
    return make_plan(JobSpec.from_yaml(path, overrides), code, target, now=now, suffix="1a2b3c")


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(SpecError) as caught:
        JobSpec.from_yaml(path, overrides)
    return str(caught.value)


def test_every_script_argument_but_null_is_passed(job: WriteJob) -> None:
    path = job(SCRIPT, train_py="")
    assert plan_of(path).config.args == ARGV
    assert plan_of(path, "code.args.lr=0", "code.args.seed=-0.0").config.args[:8] == [
        *("--seed", "-0.0", "--dropout", "0.0", "--workers", "0", "--lr", "0"),
    ]
    assert plan_of(path, "code.args=[--seed, 0, 0.0, 1e-4, '']").config.args == [
        "--seed",
        "0",
        "0.0",
        "1e-4",
        "",
    ]
    assert script_argv(Code(script="train.py", args={"seed": 0, "lr": 0.0}).args) == [
        "--seed",
        "0",
        "--lr",
        "0.0",
    ]


def test_a_list_becomes_several_words(job: WriteJob) -> None:
    source = (
        "import argparse\nparser = argparse.ArgumentParser()\n"
        "parser.add_argument('--layers', nargs='+', type=int)\nparser.add_argument('--rates', nargs=2)\n"
        "print(vars(parser.parse_args()))\n"
    )
    path = job(
        SCRIPT.replace("{seed: 0,", "{layers: [64, 32], rates: [1e-4, low],"), train_py=source
    )
    path.write_text(
        path.read_text().partition(", dropout")[0]
        + "}\ncluster: {instance_type: ml.p4d.24xlarge}\n"
    )
    plan = plan_of(path)
    assert plan.config.args == ["--layers", "64", "32", "--rates", "1e-4", "low"]
    done = subprocess.run(
        [sys.executable, path.with_name("train.py"), *plan.config.args],
        capture_output=True,
        check=True,
    )
    assert done.stdout.decode() == "{'layers': [64, 32], 'rates': ['1e-4', 'low']}\n"
    again = load_job_document(
        json.loads(json.dumps(JobSpec.from_yaml(path).to_document())), "plan.json"
    )
    assert script_argv(again.code.args) == plan.config.args
    # AWS's toolkit starts the worker, which reads the same run.json: no argument is a hyperparameter.
    by_toolkit = plan_of(path, "cluster.distribution=pytorchddp")
    assert by_toolkit.cluster.launcher == "toolkit"
    assert by_toolkit.config.args == plan.config.args
    assert not any("layers" in name for name in by_toolkit.request["HyperParameters"])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (
            "[64, [32]]",
            "4:23  code.args.layers[1]: expected text or a number for a script's argument, got [32]",
        ),
        (
            "[64, true]",
            "4:23  code.args.layers[1]: expected text or a number for a script's argument, got true",
        ),
        (
            "[null]",
            "4:19  code.args.layers[0]: expected text or a number for a script's argument, got null",
        ),
        (
            "{a: 1}",
            '4:18  code.args.layers: expected text or a number for a script\'s argument, got {"a": 1}',
        ),
        ("[]", "4:18  code.args.layers: an empty list has no values for --layers"),
    ],
)
def test_only_text_and_numbers_are_words_of_a_list(
    job: WriteJob, value: str, expected: str
) -> None:
    text = f"name: demo\ncode:\n  script: train.py\n  args: {{layers: {value}}}\n"
    path = job(text + "cluster: {instance_type: ml.p4d.24xlarge}\n", train_py="")
    assert refusal(path).startswith(f"{path}:{expected}")


def test_false_is_refused_with_both_ways_to_write_it(job: WriteJob) -> None:
    path = job(SCRIPT.replace('bf16: "False"', "bf16: false"), train_py="")
    message = refusal(path)
    assert message.startswith(
        f"{path}:4:81  code.args.bf16: false is ambiguous: it can mean --bf16 False or no argument"
    )
    assert 'write bf16: "False"' in message
    assert "remove the key" in message
    assert refusal(path, "code.args.bf16=False").startswith(
        "--set code.args.bf16=False  code.args.bf16: false is ambiguous"
    )
    assert "--bf16" not in plan_of(path, "code.args.bf16=null").config.args
    assert plan_of(path, 'code.args.bf16="False"').config.args == ARGV
    with pytest.raises(SpecError, match="false is ambiguous"):
        Code(script="train.py", args={"bf16": False})


def test_the_plan_shows_the_command_and_what_null_omits(
    cli: Cli, job: WriteJob, capsys: pytest.CaptureFixture[str]
) -> None:
    path = job(SCRIPT, train_py="")
    print_plan(plan_of(path))
    assert f"\ncommand       {COMMAND} (null omits --warmup)\n" in capsys.readouterr().out
    shown = cli("plan", path, "--json").json["command"]
    assert shown == {"text": COMMAND, "entry": "train.py", "args": ARGV, "omitted": ["--warmup"]}


def test_the_command_line_can_be_given_to_a_shell(job: WriteJob) -> None:
    words = ["a b", "it's", "two\nlines", "\x1b[31m\\'\u2028", "$HOME", "é", ""]
    path = job(SCRIPT, train_py="")
    text = plan_of(path, f"code.args={json.dumps(words)}").to_json()["command"]["text"]
    assert text.isprintable()
    shell = ["bash", "-c", f"python() {{ printf '%s\\0' \"$@\"; }}; {text}"]
    done = subprocess.run(shell, capture_output=True, check=True, env={"LC_ALL": "C.UTF-8"})
    assert done.stdout.decode().split("\0")[:-1] == ["train.py", *words]


def test_a_task_takes_its_arguments_unchanged(job: WriteJob) -> None:
    text = SCRIPT.partition("code:")[0] + (
        'code: {task: "mine:Mine", args: {layers: 0, bias: false, name: null}}\n'
        "cluster: {instance_type: ml.p4d.24xlarge}\ntrain: {epochs: 1, batch_size: 1}\n"
    )
    plan = plan_of(job(text, mine_py=MINE))
    assert plan.config.args == {"layers": 0, "bias": False, "name": None}
    command = plan.to_json()["command"]
    assert command["text"] == "mine:Mine(layers=0, bias=False, name=None)"
    assert command["omitted"] == []


def test_the_plan_shows_the_local_rank_that_is_added(job: WriteJob) -> None:
    path = job(SCRIPT, train_py="")
    conventions = ScriptConventions("--local_rank")
    assert plan_of(path, conventions=conventions).to_json()["command"]["text"] == COMMAND.replace(
        "train.py", "train.py --local_rank=$LOCAL_RANK"
    )
    assert (
        plan_of(path, "code.args.local_rank=0", conventions=conventions).config.local_rank_option
        is None
    )
    omitted = plan_of(path, "code.args.local_rank=null", conventions=conventions)
    assert omitted.config.local_rank_option == "--local_rank"


def test_a_resumed_script_gets_numbers_as_they_were_written(job: WriteJob) -> None:
    path = job(SCRIPT, train_py="")
    for overrides in ([], ["code.args=[--lr, 1e-4, --id, 007]"]):
        spec = JobSpec.from_yaml(path, overrides)
        again = load_job_document(json.loads(json.dumps(spec.to_document())), "plan.json")
        assert script_argv(again.code.args) == script_argv(spec.code.args)
