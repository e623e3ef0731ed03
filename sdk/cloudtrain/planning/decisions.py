"""`Decisions`: everything of a plan that does not depend on the run id."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from cloudtrain.job.spec import JobSpec
from cloudtrain.planning.cost import CostPlan, TimeLimits
from cloudtrain.planning.plan import ClusterPlan, CodeInfo
from cloudtrain.planning.storage_layout import ResumeSource
from cloudtrain.planning.targets import Target
from cloudtrain_runtime.contract import RunConfig


@dataclass(frozen=True)
class Decisions:
    """Everything of a plan that does not depend on the run id.

    Attributes:
        spec: The job.
        code: The code.
        target: Where the run takes place.
        created: Time of the plan, in UTC.
        cluster: Instances and ranks.
        image: Uri of the container image; empty when there is none, which is an error.
        limits: Time limits.
        cost: Estimated cost.
        resumed: The checkpoints that `checkpoint.resume` names.
        config: `run.json` without run, request and `checkpoint.uri`.
        identity: sha256 over everything that is sent and run, without the run id; empty before it is computed.
    """

    spec: JobSpec
    code: CodeInfo
    target: Target
    created: datetime
    cluster: ClusterPlan
    image: str
    limits: TimeLimits
    cost: CostPlan
    resumed: ResumeSource | None
    config: RunConfig
    identity: str = ""
