"""The `tracking` section of job.yaml."""

from __future__ import annotations

import re
from typing import Annotated

from cloudtrain.job.fields import Section, matching
from cloudtrain.support.aws_names import arn_pattern

_MLFLOW_FORM = matching(
    re.compile(rf"{arn_pattern('sagemaker', 'mlflow-[a-zA-Z-]*/.+')}|https?://[^\s]+"),
    "the ARN of a SageMaker MLflow resource, or https://host",
    "to list them: aws sagemaker list-mlflow-tracking-servers",
)


class Tracking(Section):
    """Where metrics go besides the event lines."""

    tensorboard: bool = False
    """Write a Task's curves for TensorBoard, and copy /opt/ml/output/tensorboard to S3 while the job runs."""
    mlflow: Annotated[str, _MLFLOW_FORM] | None = None
    """ARN of a SageMaker MLflow tracking server or app, or the uri of a tracking server."""
