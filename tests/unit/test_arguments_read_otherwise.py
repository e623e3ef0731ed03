"""Warnings about values of `code.args` that the code gets in another form than its source reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import cloudtrain

WriteJob = Callable[..., Path]
JOB = "name: demo\ncode:\n  CODE\ncluster: {instance_type: ml.g5.xlarge}\nTRAIN\n"
SCRIPT = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.add_argument("--steps", type=int)
parser.add_argument("--amp", action="store_true")
parser.add_argument("--tf32", type=bool)
parser.add_argument("--layers")
parser.add_argument("--cache-dir")
"""
TASK = """
from cloudtrain_runtime import Task

class Mine(Task):
    def __init__(self, steps: int, lr=0.1, amp=False, mode: str = "on", cache_dir=None, rest=None): ...
    def model(self): ...
    def datasets(self): ...
    def loss(self, model, batch): ...
"""


def warnings_of(job: WriteJob, args: str, source: str) -> list[str]:
    """Return the warnings of a plan about the arguments."""
    is_task = source is TASK
    code = "task: 'mine:Mine'" if is_task else "script: train.py"
    text = JOB.replace("CODE", f"{code}\n  args: {args}")
    text = text.replace("TRAIN", "train: {steps: 3}" if is_task else "")
    path = job(text, **{"mine_py" if is_task else "train_py": source})
    found = cloudtrain.plan(path, local=True).warnings
    return [each for each in found if each.startswith("code.args")]


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ("\n    lr: 0,001", "gets --lr 0,001 and expects a number; write 0.001"),
        ("\n    steps: 1,000", "gets --steps 1,000 and expects an integer; write 1000"),
        ("{steps: 1e3}", "gets --steps 1e3 and expects an integer"),
        ("{amp: off}", "off is text in YAML 1.2, and --amp takes no value; remove it"),
        ("{amp: yes}", "--amp takes no value; write true for --amp alone"),
        ("{tf32: off}", "type=bool of argparse takes every text for true"),
        ("{cache-dir: ~}", "~ is null in YAML, not the home folder"),
    ],
)
def test_a_script_reads_it_otherwise(job: WriteJob, args: str, expected: str) -> None:
    (found,) = warnings_of(job, args, SCRIPT)
    assert expected in found


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ('{steps: 3, lr: "1e-4"}', 'gets the text "1e-4" and expects a number; write 1e-4'),
        ("\n    steps: 1,000", 'gets the text "1,000" and expects an integer; write 1000'),
        ("{steps: 3, amp: off}", 'off is the text "off" in YAML 1.2'),
        ("{steps: 3, cache_dir: ~}", "~ is null in YAML, not the home folder"),
    ],
)
def test_a_task_reads_it_otherwise(job: WriteJob, args: str, expected: str) -> None:
    (found,) = warnings_of(job, args, TASK)
    assert expected in found


@pytest.mark.parametrize(
    ("source", "args"),
    [
        (SCRIPT, "{lr: 1e-4, steps: 1_000, amp: true, layers: 64}"),
        (SCRIPT, '{layers: "64,32", lr: ~, other: off, unknown: 1e3}'),
        (TASK, "{steps: 1_000, lr: 1e-4, amp: true, mode: off, cache_dir: null, rest: off}"),
        (TASK, '{steps: 3, lr: auto, cache_dir: "~", rest: "1e-4"}'),
    ],
)
def test_what_the_code_can_read_is_not_named(job: WriteJob, source: str, args: str) -> None:
    assert warnings_of(job, args, source) == []


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (
            "{cache-dir: $SM_CHANNEL_TRAIN}",
            "code.args.cache-dir: $SM_CHANNEL_TRAIN is replaced in a",
        ),
        ("{cache-dir: '${SM_CHANNEL_TRAIN}/a.zip'}", "write /opt/ml/input/data/train"),
        (
            "[--cache-dir, $SM_CHANNEL_TRAIN]",
            "code.args[1]: $SM_CHANNEL_TRAIN is replaced in a command only",
        ),
        ("{layers: [1, $SM_MODEL_DIR]}", "write /opt/ml/model"),
        ("{cache-dir: $CLOUDTRAIN_CHECKPOINT_DIR/x}", "write /opt/ml/checkpoints"),
        ("{layers: $LOCAL_RANK}", 'read os.environ["LOCAL_RANK"] in the code'),
        ("{cache-dir: $SM_CHANNEL_TEST}", "name the channel test in data, and write"),
    ],
)
def test_placeholders_of_commands_are_not_replaced(job: WriteJob, args: str, expected: str) -> None:
    path = job(_with_channel(args), train_py=SCRIPT)
    (found,) = _argument_warnings(path)
    assert expected in found


@pytest.mark.parametrize(
    ("args", "source"),
    [
        ("{cache-dir: $HOME/x, layers: $$SM_MODEL_DIR}", SCRIPT),
        ("{cache-dir: '${oc.env:SM_CHANNEL_TRAIN}'}", SCRIPT),
        ("{cache-dir: SM_CHANNEL_TRAIN}", SCRIPT),
        ("{cache-dir: $SM_CHANNEL_TRAIN}", f"{SCRIPT}import os\nos.path.expandvars('$A')\n"),
        ("{cache-dir: $SM_CHANNEL_TRAIN}", f"{SCRIPT}import os\nos.run('a $A', shell=True)\n"),
    ],
)
def test_text_that_the_code_may_expand_is_no_mistake(job: WriteJob, args: str, source: str) -> None:
    assert _argument_warnings(job(_with_channel(args), train_py=source)) == []


def test_a_task_gets_no_placeholder_either(job: WriteJob) -> None:
    (found,) = warnings_of(job, "{steps: 3, cache_dir: $SM_MODEL_DIR}", TASK)
    assert found.startswith("code.args.cache_dir: $SM_MODEL_DIR is replaced in a command only")


def test_a_variable_gets_no_placeholder_either(job: WriteJob) -> None:
    text = _with_channel("{}\n  env: {DATA: $SM_CHANNEL_TRAIN/a, HERE: $PWD}")
    (found,) = [
        each for each in cloudtrain.plan(job(text, train_py=SCRIPT)).warnings if "DATA" in each
    ]
    assert found.startswith("code.env.DATA: $SM_CHANNEL_TRAIN is replaced in a command only")


def test_a_command_has_its_placeholders(job: WriteJob) -> None:
    text = _with_channel("{out: $SM_CHANNEL_TRAIN}").replace(
        "script: train.py", "command: ['true']"
    )
    assert _argument_warnings(job(text, train_py=SCRIPT)) == []


def _with_channel(args: str) -> str:
    text = JOB.replace("CODE", f"script: train.py\n  args: {args}")
    return text.replace("TRAIN\n", "data: {train: s3://my-bucket/tokens/}\n")


def _argument_warnings(path: Path) -> list[str]:
    found = cloudtrain.plan(path).warnings
    return [each for each in found if each.startswith("code.args")]


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ("['--lr 0.1']", ["code.args[0]: the script gets '--lr 0.1' as one word"]),
        (
            "\n    - --amp\n    - --steps 3",
            ["code.args[1]: the script gets '--steps 3' as one word"],
        ),
        ("[--lr, 0.1]", []),
        ("[--lr=0.1]", []),
        ("[--cache-dir=/a b]", []),
        ("[--note, '--other 3']", []),
    ],
)
def test_an_option_and_its_value_are_two_words(
    job: WriteJob, args: str, expected: list[str]
) -> None:
    """Argparse takes a word with a space for no option, and an unknown one may be meant for another program."""
    found = warnings_of(job, args, SCRIPT)
    assert [each.partition(" as one word")[0] + " as one word" for each in found] == expected
