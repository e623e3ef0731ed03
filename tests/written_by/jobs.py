"""Job files that name every field of job.yaml."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from cloudtrain.job.spec import JobSpec

JOBS = {
    "task": """\
name: every-field
code:
  directory: .
  task: train:Mine
  args: {layers: 4}
  requirements: requirements.txt
  env: {OMP_NUM_THREADS: "8", API_KEY: {secret: team/key, key: api_key, stage: AWSPREVIOUS}}
  include: [../shared]
cluster:
  instance_type: ml.p4d.24xlarge
  instances: 2
  distribution: torch_distributed
  processes_per_instance: 8
  spot: {max_wait: 36h}
  framework: "2.13"
  volume: 200GB
  max_pending: 6h
  remote_debug: true
  health_check: true
  network: {subnets: [subnet-1], security_groups: [sg-1], isolation: false, encrypt_traffic: true}
data:
  train: {uri: s3://bucket/train, mode: FastFile, sharded: true}
  tokens: {fsx: fs-0123456789abcdef0, path: /fsx/tokens, mount: ro}
  notes: {efs: fs-0123456789abcdef1}
train:
  steps: 1000
  batch_size: 16
  accumulate: 2
  precision: bf16
  parallel: {data: fsdp, tensor: 2, pipeline: 2, schedule: 1f1b, shard: 2, reshard: false, offload: true}
  compile: false
  clip_grad_norm: 1.0
  learning_rate: 0.01
  schedule: cosine
  warmup: 100 steps
  activation_checkpointing: true
  deterministic: true
  skip_nonfinite: 3
  export: best
  export_nonfinite: true
  workers: 4
  drop_last: true
  init_from: s3://bucket/model.pt
  seed: 7
  evaluate: {every: 200 steps}
  early_stopping: {metric: validation/loss, patience: 3, min_delta: 0.1, mode: min}
  profile: {at: 100, steps: 5}
checkpoint: {uri: s3://bucket/checkpoints, every: 500 steps, keep: 2, size: 48GB, resume: never}
limits: {runtime: 36h, cost: 50000 USD, retries: 3, hang: 20m, require_rehearsal: true,
  recover: {attempts: 3, cost: 150000 USD, time: 7d, on: [capacity, interruption]}}
tracking:
  tensorboard: true
  mlflow: "arn:aws:sagemaker:us-west-2:123456789012:mlflow-tracking-server/team"
  wandb: {project: digits, entity: vision, mode: offline}
output: {uri: s3://bucket/models, compress: false}
notify: {sns: "arn:aws:sns:us-west-2:123456789012:runs"}
tags: {team: vision}
report: true
request: {ExperimentConfig: {ExperimentName: digits}}
""",
    "ddp": """\
name: every-field-of-ddp
code: {task: "train:Mine"}
cluster:
  prefer:
    - {instance_type: ml.p4d.24xlarge, instances: 2}
    - instance_type: ml.p5.48xlarge
      instances: 2
      training_plan: "arn:aws:sagemaker:us-west-2:123456789012:training-plan/large"
train:
  epochs: 3
  parallel: {static_graph: false, find_unused: true, compress: bf16, bucket: 25MB}
""",
    "script": """\
name: every-field-of-a-script
code: {script: train.py, args: [--rate, 0.1], outputs: [out/]}
cluster:
  instance_type: ml.p4d.24xlarge
  image:
    uri: registry.example.com/train:1
    private_registry: {credentials: "arn:aws:lambda:us-west-2:123456789012:function:login"}
  network: {subnets: [subnet-1], security_groups: [sg-1]}
metrics: {loss: "loss=([0-9.]+)", step: "step ([0-9]+)"}
""",
    "module": """\
name: every-field-of-a-module
code: {module: train}
cluster:
  instance_type: ml.p4d.24xlarge
  keep_alive: 30m
""",
    "command": """\
name: every-field-of-a-command
code: {command: [bash, train.sh], launcher: own}
cluster:
  instance_type: ml.p4d.24xlarge
  queue: {name: training, priority: 100, quota_share: vision, preempt: 3}
""",
    "queue": """\
name: a-share-of-a-queue
code: {script: train.py}
cluster: {instance_type: ml.p4d.24xlarge, queue: {name: training, share: research}}
""",
    "reserved": """\
name: reserved
code: {script: train.py}
cluster:
  instance_type: ml.p4d.24xlarge
  training_plan: "arn:aws:sagemaker:us-west-2:123456789012:training-plan/large"
""",
}


_PROGRAM = """\
from cloudtrain_runtime import Task


class Mine(Task):
    def __init__(self, layers=1):
        self.layers = layers

    def model(self):
        raise NotImplementedError

    def datasets(self):
        raise NotImplementedError

    def loss(self, model, batch):
        raise NotImplementedError

    def parallelize(self, model, mesh):
        raise NotImplementedError

    def pipeline(self, model, stages):
        raise NotImplementedError
"""
FILES = {
    "train.py": _PROGRAM,
    "train.sh": "python train.py\n",
    "requirements.txt": "numpy\n",
}
"""The files that they name."""


def document_of(path: Path) -> Any:
    """Return all values of a job file, also those that it does not name, as JSON values.

    Raises:
        SpecError: The job is not valid.
    """
    return JobSpec.from_yaml(path).model_dump(mode="json")


def unnamed_fields(paths: list[Path]) -> set[str]:
    """Return the fields of job.yaml that none of these files names, as `Section.field`."""
    named = {field for path in paths for field in _named(JobSpec.from_yaml(path))}
    known = {
        f"{section.__name__}.{name}"
        for section in _sections(JobSpec)
        for name in section.model_fields
    }
    return known - named


def _named(section: BaseModel) -> Iterator[str]:
    for name in section.model_fields_set:
        yield f"{type(section).__name__}.{name}"
        for below in _models_in(getattr(section, name)):
            yield from _named(below)


def _models_in(value: Any) -> Iterator[BaseModel]:
    if isinstance(value, BaseModel):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _models_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _models_in(each)


def _sections(section: type[BaseModel]) -> set[type[BaseModel]]:
    found = {section}
    for field in section.model_fields.values():
        for below in _models_of(field.annotation):
            found |= _sections(below)
    return found


def _models_of(annotation: Any) -> Iterator[type[BaseModel]]:
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models_of(part)
