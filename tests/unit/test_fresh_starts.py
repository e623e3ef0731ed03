"""A trainer that begins at step 0 over its checkpoints is named in the plan, and others are not."""

from __future__ import annotations

import pytest
from support.jobs import Cli
from support.plans import WriteJob

HF = "from transformers import Trainer\n"
DPO = "from trl import DPOTrainer, TrlParser\ntrainer = DPOTrainer(model, args=args)\n"
LIGHTNING = "import lightning as L\ntrainer = L.Trainer(max_steps=9)\n"

ALWAYS_ANEW = {
    "TRL": (
        f"{DPO}trainer.train()",
        "train.py:3 calls train of a trainer without resume_from_checkpoint",
    ),
    "a trainer that is not kept": (f"{HF}Trainer(model).train()", "train.py:2 calls train"),
    "a class of its own": (
        f"{HF}class Mine(Trainer): pass\nt = Mine(model)\nt.train()",
        "train.py:4 calls train",
    ),
    "an attribute": (
        "import transformers\nself.t = transformers.Trainer(m)\nself.t.train()",
        "train.py:3 calls train",
    ),
    "Lightning": (f"{LIGHTNING}trainer.fit(model, data)", "train.py:3 calls fit"),
}
CAN_CONTINUE = {
    "the argument": f"{DPO}trainer.train(resume_from_checkpoint=last)",
    "it is mentioned": f"{DPO}trainer.train(training_args.resume_from_checkpoint)",
    "by a mapping": f"{DPO}trainer.train(**{{'resume_from_checkpoint': last}})",
    "an argument of Lightning": f"{LIGHTNING}trainer.fit(model, data, ckpt_path='last')",
    "attached": f"from cloudtrain_runtime.integrations.huggingface import attach\n{DPO}attach(trainer)\ntrainer.train()",
    "the mode of a module": f"{HF}model = Model()\nmodel.train()",
    "another trainer": "import transformers\nfrom mine import Trainer\nTrainer(model).train()",
    "no training": f"{DPO}trainer.evaluate()",
}


def warnings_of(cli: Cli, job: WriteJob, code: str) -> list[str]:
    path = job(
        "name: t\ncode: {script: train.py, args: {output_dir: /opt/ml/checkpoints}}\n"
        "cluster: {instance_type: ml.g5.xlarge}\n",
        train_py=code,
    )
    return [
        each for each in cli("plan", path, "--json").json["warnings"] if "begins at step 0" in each
    ]


@pytest.mark.parametrize("case", ALWAYS_ANEW)
def test_a_training_that_never_continues_is_named(cli: Cli, job: WriteJob, case: str) -> None:
    code, begins = ALWAYS_ANEW[case]
    (found,) = warnings_of(cli, job, code)
    assert found.startswith(begins)
    assert "attach(trainer) of cloudtrain_runtime.integrations." in found


@pytest.mark.parametrize("case", CAN_CONTINUE)
def test_a_training_that_can_continue_is_not(cli: Cli, job: WriteJob, case: str) -> None:
    assert warnings_of(cli, job, CAN_CONTINUE[case]) == []
