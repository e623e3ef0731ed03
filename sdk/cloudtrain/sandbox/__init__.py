"""A local AWS whose training jobs really run.

One process on loopback: moto answers S3, IAM, STS, CloudWatch Logs and what else a client calls; in front of it stands
a SageMaker of our own, which executes the CreateTrainingJob document with `cloudtrain.container`. It knows nothing of
plans: any client's request runs, or is refused as AWS refuses it.
"""

from cloudtrain.sandbox.running import Sandbox, find_sandbox, start_sandbox, stop_sandbox

__all__ = ["Sandbox", "find_sandbox", "start_sandbox", "stop_sandbox"]
