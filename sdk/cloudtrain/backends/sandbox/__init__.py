"""The sandbox: a local AWS whose training jobs really run.

One process serves on loopback: moto implements S3, IAM, STS, CloudWatch Logs and other services. SageMaker's training
jobs and AWS Batch's service jobs are implemented here and run each CreateTrainingJob request with
`cloudtrain.backends.container`. The sandbox does not read plans: it runs the request of any client, or rejects it as
AWS does.
"""

from cloudtrain.backends.sandbox.process import (
    Sandbox,
    find_sandbox,
    start_sandbox,
    stop_sandbox,
)

__all__ = ["Sandbox", "find_sandbox", "start_sandbox", "stop_sandbox"]
