"""The `metrics`, `tracking`, `output` and `notify` sections of job.yaml: what a run reports, and where it goes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from cloudtrain.job.diagnostics import Diagnostic, field_error
from cloudtrain.job.fields import Section, matching, s3_uri_error
from cloudtrain.support.aws_names import arn_pattern
from cloudtrain_runtime.contract.lazy_pattern import lazy_pattern

PROGRESS_METRICS = ("step", "total")
"""Names of the patterns that find a run's progress."""

_NESTED = lazy_pattern(r"[+*]\)[+*{]")
_MAX_CHARACTERS = 500
"""Longest regular expression of a metric definition. Source: CreateTrainingJob, MetricDefinition."""


def _check_pattern(value: object) -> object:
    if not isinstance(value, str):
        raise field_error(
            f"expected a regular expression, got {value!r}", hint="for example 'loss=([0-9.]+)'"
        )
    try:
        groups = re.compile(value).groups
    except re.error as error:
        raise field_error(
            f"not a regular expression: {error}", hint="for example 'loss=([0-9.]+)'"
        ) from None
    if groups != 1:
        raise field_error(
            f"expected one group that matches the value, got {groups}",
            hint="for example 'loss=([0-9.]+)'; (?:...) groups without capturing",
        )
    if _NESTED.search(value):
        message = "a repetition of a group that ends with a repetition can take hours for one line"
        raise field_error(message, hint="for example a+ in place of (?:a+)+")
    if len(value) > _MAX_CHARACTERS:
        raise field_error(
            f"{len(value)} characters; SageMaker allows {_MAX_CHARACTERS}", hint="shorten it"
        )
    return value


def qualified_name(name: str) -> str:
    """Return the name under which `status` shows a metric: one without a split belongs to the training split."""
    return name if "/" in name else f"train/{name}"


MetricPattern = Annotated[str, BeforeValidator(_check_pattern)]
"""A regular expression with one group."""

_NAME = matching(
    lazy_pattern(r"[A-Za-z0-9_.:/-]{1,255}"),
    "letters, digits and _ . : / -",
    "for example validation/loss",
)

MetricName = Annotated[str, _NAME]
"""Name of a metric; `step` and `total` are the progress."""

_MLFLOW_FORM = matching(
    lazy_pattern(
        rf"{arn_pattern('sagemaker', 'mlflow-[a-zA-Z-]*/.+')}|https?://[^\s]+|sqlite:///.+|(?!.*://).+\.(?:db|sqlite3?)"
    ),
    "the ARN of a SageMaker MLflow resource, https://host, or the path of a database such as mlflow.db",
    "to list them: aws sagemaker list-mlflow-tracking-servers",
)


_WANDB_NAME = matching(
    lazy_pattern(r"[^/\\#?%:\s][^/\\#?%:]{0,127}"),
    "a name without / \\ # ? % :",
    "the name is the one in the address of the project: wandb.ai/ENTITY/PROJECT",
)


class Wandb(Section):
    """The run at Weights & Biases."""

    project: Annotated[str, _WANDB_NAME] | None = Field(None, examples=["segmentation"])
    """Name of the project; default: the job's name."""
    entity: Annotated[str, _WANDB_NAME] | None = Field(None, examples=["my-team"])
    """Name of the team or user; default: that of the key."""
    mode: Literal["online", "offline", "disabled"] = "online"
    """Log while the job runs (`online`), write files for `wandb sync` (`offline`), or nothing (`disabled`)."""


class Tracking(Section):
    """Where metrics go besides the event lines."""

    tensorboard: bool = False
    """Write a Task's curves for TensorBoard, and copy /opt/ml/output/tensorboard to S3 while the job runs."""
    mlflow: Annotated[str, _MLFLOW_FORM] | None = None
    """ARN of a SageMaker MLflow server or app, uri of a server, or path of a database such as mlflow.db (local)."""
    wandb: Wandb | None = None
    """Log the run at Weights & Biases."""


class Output(Section):
    """Where and how SageMaker stores the model and the other outputs of a run."""

    uri: str | None = Field(None, examples=["s3://bucket/models"])
    """s3://bucket/prefix below which `<run>/output/` is stored; default: the settings' bucket and prefix."""
    compress: bool = True
    """Store the model as model.tar.gz; false stores its files below `<run>/output/model/`, which is faster."""

    def _cross_field_errors(self) -> Iterator[Diagnostic]:
        if self.uri is not None and (s3_uri_error(self.uri) or not self.uri.startswith("s3://")):
            message = f'expected s3://bucket/prefix, got "{self.uri}"'
            yield Diagnostic(message, ("uri",), "for example s3://my-bucket/models")


_TOPIC_FORM = matching(
    lazy_pattern(arn_pattern("sns", r"[A-Za-z0-9_-]{1,256}")),
    "the ARN of an SNS topic",
    "to list them: aws sns list-topics",
)


class Notify(Section):
    """Who gets a message when a run ends."""

    sns: Annotated[str, _TOPIC_FORM] = Field(
        examples=["arn:aws:sns:us-west-2:123456789012:training"]
    )
    """ARN of the SNS topic that gets a message at the end of a run by EventBridge (infra/: notify_topics)."""
