"""The example of LoRA, stopped and resumed, and the model that it exports. `make test-all`."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.framework_runs import RECORDER, interrupt_and_compare
from support.jobs import EXAMPLES, Cli

import cloudtrain
from cloudtrain.features.serving.hugging_face import export_model

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(
        importlib.util.find_spec("peft") is None,
        reason="NOT TESTED: PEFT is not installed here (make test-all)",
    ),
]

PROBE = """
import runpy
from recorder import Recorder
from transformers import Trainer, TrainingArguments

log, check, recorders = Trainer.log, TrainingArguments.__post_init__, []

def log_and_record(self, logs, start_time=None):
    recorders or recorders.append(Recorder())
    if "loss" in logs:
        recorders[0].record(self.state.global_step, logs["loss"])
    log(self, logs, start_time)

def log_each_step(self):
    self.logging_steps = 1
    check(self)

Trainer.log, TrainingArguments.__post_init__ = log_and_record, log_each_step
runpy.run_path("train.py", run_name="__main__")
"""


@pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"
)  # PEFT reads it
def test_an_adapter_resumes_and_beats_its_base(cli: Cli, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(EXAMPLES / "finetune-lora", tmp_path / "job"))
    subprocess.run([sys.executable, "make_base.py"], cwd=folder, check=True, capture_output=True)
    for name, content in (("probe.py", PROBE), ("recorder.py", RECORDER)):
        (folder / name).write_text(content)
    short = (
        "--set=code.script=probe.py",
        f"--set=data.base.uri={folder / 'base'}",
        "--set=code.args.epochs=2",
    )
    runs = interrupt_and_compare(
        cli, folder / "job.yaml", tmp_path / "records", stop_at=17, settings=short
    )
    metrics = runs.done["metrics"]
    assert metrics["test/loss"] < 0.8 * metrics["test/base_loss"]
    for name in ("test/loss", "test/base_loss"):
        assert runs.resumed["metrics"][name] == metrics[name]
    assert not [name for name in metrics if name.endswith(("runtime", "per_second"))]
    models = [Path(each["artifacts"]["model_folder"]) for each in (runs.done, runs.resumed)]
    first, second = [(each / "model.safetensors").read_bytes() for each in models]
    assert first == second
    checkpoint = next((models[0].parent / "checkpoints").glob("checkpoint-*"))
    weights = {path.name for path in checkpoint.glob("*.safetensors")}
    assert weights == {"adapter_model.safetensors"}, "only what is trained"

    exported, _ = export_model(cloudtrain.get_run(runs.resumed["run"]), tmp_path / "exported", None)
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    words = AutoTokenizer.from_pretrained(exported)("two plus three is", return_tensors="pt")
    merged = AutoModelForCausalLM.from_pretrained(exported)
    cli(
        "download",
        runs.resumed["run"],
        "--to",
        tmp_path / "downloaded",
        "--what",
        "outputs",
        "--unpack",
    )
    (adapter,) = (path.parent for path in (tmp_path / "downloaded").rglob("adapter_config.json"))
    adapted = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(folder / "base"), adapter
    )
    with torch.no_grad():
        torch.testing.assert_close(
            merged(**words).logits, adapted(**words).logits, rtol=1e-4, atol=1e-4
        )
