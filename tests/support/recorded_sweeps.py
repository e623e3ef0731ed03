"""Sweeps that have ended, written by the product's own parts without running a trial."""

import dataclasses
from pathlib import Path

from cloudtrain.features.sweeps.loader import make_sweep
from cloudtrain.features.sweeps.stored_sweep import StoredSweep
from cloudtrain.features.sweeps.study import Study
from cloudtrain.features.sweeps.trial import TrialState
from cloudtrain.job.spec import JobSpec

JOB = {
    "name": "searched",
    "code": {"script": "train.py"},
    "cluster": {"instance_type": "ml.p4d.24xlarge"},
}
SPACE = {
    "code.args.rate": {"uniform": [0.0, 1.0]},
    "code.args.optimizer": {"choice": ["adam", "sgd"]},
    "code.args.width": {"int": [8, 64]},
}


def write_sweep(home: Path, code: Path, trials: int = 6) -> str:
    """Write a sweep whose objective is the distance of `rate` from 0.3; the last trial was pruned. Return its id."""
    code.mkdir(parents=True, exist_ok=True)
    (code / "train.py").write_text("")
    job = JobSpec.model_validate({**JOB, "code": {**JOB["code"], "directory": str(code)}})
    fields = {
        "space": SPACE,
        "objective": {"metric": "validation/loss"},
        "strategy": "random",
        "trials": trials,
    }
    stored = StoredSweep.create(home, make_sweep(job, fields), "local", ("a" * 64, 0.0, trials))
    study = Study(stored)
    for number in range(trials):
        trial = study.propose()
        assert trial is not None
        state = TrialState.PRUNED if number == trials - 1 else TrialState.SUCCEEDED
        objective = abs(trial.values["code.args.rate"] - 0.3)
        study.save(dataclasses.replace(trial, state=state, objective=objective))
    study.set_end("SUCCEEDED", "")
    study.close()
    return stored.id
