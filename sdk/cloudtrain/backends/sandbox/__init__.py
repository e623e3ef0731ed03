"""A local AWS whose training jobs really run.

One process on loopback: moto serves S3, IAM, STS, CloudWatch Logs and other services. An implementation of SageMaker's
training jobs in front of it runs each CreateTrainingJob request with `cloudtrain.backends.container`. It does not read
plans: the request of any client runs, or is rejected as AWS rejects it.
"""

from cloudtrain.backends.sandbox.process import (
    Sandbox,
    find_sandbox,
    start_sandbox,
    stop_sandbox,
)

__all__ = ["Sandbox", "find_sandbox", "start_sandbox", "stop_sandbox"]
