"""The SageMaker training-container contract on this machine.

`run_job` executes a CreateTrainingJob document: one `/opt/ml`-shaped tree and one process tree per instance, the JSON
files and variables that SageMaker provides, `model.tar.gz` at the end and `output/failure` on failure. It knows
nothing of cloudtrain's plans; the document is all it gets.
"""

from cloudtrain.backends.container.job import (
    JobFolder,
    Outcome,
    Transition,
    run_job,
)
from cloudtrain.backends.container.machine import usable_cpus, visible_gpus

__all__ = ["JobFolder", "Outcome", "Transition", "run_job", "usable_cpus", "visible_gpus"]
