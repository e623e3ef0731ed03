"""TRL's SFT trainer with one line of cloudtrain: stopped and resumed, it trains the same. `make test-all`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
from support.framework_runs import RECORDER, interrupt_and_compare, kill_and_compare
from support.jobs import Cli
from support.sizes import IS_NIGHTLY

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(
        importlib.util.find_spec("trl") is None,
        reason="NOT TESTED: TRL is not installed here (make test-all)",
    ),
]

JOB = """\
name: trl
code:
  script: train.py
  env: {HF_HUB_OFFLINE: "1", HF_DATASETS_OFFLINE: "1", HF_HOME: ./home, TOKENIZERS_PARALLELISM: "false"}
cluster: {instance_type: ml.p4d.24xlarge}
checkpoint: {every: 10 steps, keep: 2}
"""
SCRIPT = """
import random

import torch
from datasets import Dataset
from recorder import Recorder
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

from cloudtrain_runtime.integrations.huggingface import attach

set_seed(1)
words = [f"w{number}" for number in range(50)]
vocabulary = {word: index for index, word in enumerate(["<pad>", "<eos>", "<unk>", *words])}
plain = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
plain.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64, attention_dropout=0.1, pad_token_id=0, eos_token_id=1, bos_token_id=1,
    )
)
dice = random.Random(3)
texts = [" ".join(dice.choices(words, k=12)) for _ in range(120)]
arguments = SFTConfig(
    output_dir="unused", num_train_epochs=3, per_device_train_batch_size=2, gradient_accumulation_steps=2,
    learning_rate=1e-3, logging_steps=1, eval_strategy="steps", eval_steps=15, max_length=32, use_cpu=True,
    report_to="none", disable_tqdm=True, bf16=False, seed=1, gradient_checkpointing=False,
)


class Recorded(SFTTrainer):
    recorder = None

    def log(self, logs, start_time=None):
        self.recorder = self.recorder or Recorder()
        if "loss" in logs:
            self.recorder.record(self.state.global_step, logs["loss"])
        super().log(logs, start_time)


data = Dataset.from_dict({"text": texts})
trainer = Recorded(
    model=model, args=arguments, train_dataset=data, eval_dataset=data.select(range(8)), processing_class=tokenizer
)
callback = attach(trainer)
trainer.train()
print("stopped early:", callback.is_stopped, "at", trainer.state.global_step)
"""

STARTS = ["script: train.py", *(["command: [python, train.py]"] if IS_NIGHTLY else [])]
PLAIN_JOB = """\
name: plain
code:
  START: train.py
  env: {HF_HUB_OFFLINE: "1", HF_DATASETS_OFFLINE: "1", HF_HOME: ./home, TOKENIZERS_PARALLELISM: "false"}
  outputs: [trained/]
cluster: {instance_type: ml.m5.xlarge}
"""
PLAIN_SCRIPT = (
    SCRIPT.replace("callback = attach(trainer)\n", "")
    .replace("from recorder import Recorder\n", "")
    .replace("trainer = Recorded(", "trainer = SFTTrainer(")
    .partition("print(")[0]
    .replace('"unused", num_train_epochs=3', '"trained", max_steps=4, save_steps=2')
)


@pytest.mark.parametrize("start", STARTS)
def test_a_trainer_that_begins_over_its_checkpoint_is_reported(
    start: str, cli: Cli, job: Callable[..., Path]
) -> None:
    path = job(PLAIN_JOB.replace("START: train.py", start), train_py=PLAIN_SCRIPT)
    first = cli("submit", path, "--local", "--follow", "--json")
    assert first.code == 0, first.err
    assert fresh_starts(cli, first.json["run"]) == []
    again = cli(
        "submit",
        path,
        "--local",
        "--continue",
        first.json["run"],
        "--follow",
        "--json",
    )
    assert again.code == 0, again.err
    (warning,) = fresh_starts(cli, again.json["run"])
    assert "trained/checkpoint-4 is there: pass resume_from_checkpoint to its train" in warning


def fresh_starts(cli: Cli, run: str) -> list[str]:
    return [each for each in cli("status", run, "--json").json["warnings"] if "step 0" in each]


def test_the_template_for_transformers_trains(cli: Cli, tmp_path: Path) -> None:
    assert cli("init", tmp_path / "new", "--template", "huggingface").code == 0
    done = cli("submit", tmp_path / "new" / "job.yaml", "--local", "--follow", "--json")
    assert done.code == 0, done.err
    assert done.json["last_step"] == done.json["total_steps"] > 0


def test_sft_resumes_in_the_middle_of_an_epoch(
    cli: Cli, job: Callable[..., Path], tmp_path: Path
) -> None:
    path = job(JOB, train_py=SCRIPT, recorder_py=RECORDER)
    shape = ("--instances", "2", "--set=cluster.processes_per_instance=1")
    runs = interrupt_and_compare(cli, path, tmp_path / "records", stop_at=21, settings=shape)
    assert list(runs.losses) == list(range(1, 46))
    assert runs.stopped_at < 30  # in the middle of the second epoch
    assert runs.running["total_steps"] == runs.done["total_steps"] == 45
    assert runs.running["last_step"] >= 20
    assert runs.running["seconds_left"] >= 0
    assert {"train/loss", "train/learning_rate", "validation/loss"} <= set(runs.running["metrics"])
    assert runs.resumed["last_step"] == 45
    kill_and_compare(cli, path, tmp_path / "records", runs, kill_at=25, start=21)
    for name in ("train/loss", "train/learning_rate", "validation/loss"):
        assert runs.resumed["metrics"][name] == runs.done["metrics"][name]
