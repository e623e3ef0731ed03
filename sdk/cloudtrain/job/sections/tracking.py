"""The `tracking` section of job.yaml."""

from __future__ import annotations

import re
from typing import Annotated

from cloudtrain.job.fields import Section, matching
from cloudtrain.support.aws_names import arn_pattern

_MLFLOW_FORM = matching(
    re.compile(
        rf"{arn_pattern('sagemaker', 'mlflow-[a-zA-Z-]*/.+')}|https?://[^\s]+|sqlite:///.+|(?!.*://).+\.(?:db|sqlite3?)"
    ),
    "the ARN of a SageMaker MLflow resource, https://host, or the path of a database such as mlflow.db",
    "to list them: aws sagemaker list-mlflow-tracking-servers",
)


class Tracking(Section):
    """Where metrics go besides the event lines."""

    tensorboard: bool = False
    """Write a Task's curves for TensorBoard, and copy /opt/ml/output/tensorboard to S3 while the job runs."""
    mlflow: Annotated[str, _MLFLOW_FORM] | None = None
    """ARN of a SageMaker MLflow server or app, uri of a server, or path of a database such as mlflow.db (local)."""
