"""Comparison of the recorded AWS calls with the policies of infra/."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from support.applied_policies import (
    DEPLOY,
    EXECUTION,
    IDENTITY,
    LOOK,
    RECOVERY,
    SUBMIT,
    AppliedPolicies,
)
from support.aws_calls import CLIENT, FUNCTION, Call, read_record
from support.iam_policy import Decision, Document, Grant, Request, decide, granting, grants
from support.required_actions import requests_of


@dataclass(frozen=True)
class Reason:
    """The reason for a permission that no recorded call needs.

    Attributes:
        policy: One of `IDENTITY`.
        sid: Id of the statement.
        why: Reason, for the readers of docs/reference/permissions.md.
        actions: Actions of the statement that the reason covers; empty for all.
    """

    policy: str
    sid: str
    why: str
    actions: tuple[str, ...] = ()

    def covers(self, policy: str, grant: Grant) -> bool:
        """Return whether the reason covers a grant."""
        return (policy, grant.sid) == (self.policy, self.sid) and (
            not self.actions or grant.action in self.actions
        )


REASONS = (
    Reason(EXECUTION, "EncryptVolumes", "SageMaker: encrypts the hosts' volumes"),
    Reason(
        EXECUTION,
        "MakeTheLogGroup",
        "SageMaker: required by its developer guide, to find a host's log stream",
        ("logs:DescribeLogStreams",),
    ),
    Reason(EXECUTION, "WriteLogsOfEndpoints", "SageMaker: logs of an endpoint's container"),
    Reason(
        DEPLOY,
        "UseEndpointsOfCloudtrain",
        "Application Auto Scaling: changes the number of instances",
        ("sagemaker:UpdateEndpointWeightsAndCapacities",),
    ),
    Reason(
        DEPLOY,
        "AlarmsOfScaling",
        "Application Auto Scaling: alarms of a target, with the caller's credentials",
    ),
    Reason(
        DEPLOY, "ServiceRoleOfScaling", "Application Auto Scaling: its role, once for each account"
    ),
    Reason(DEPLOY, "EncryptVolumesOfEndpoints", "SageMaker: encrypts the volumes of endpoints"),
    Reason(
        EXECUTION,
        "AskForRegistryCredentials",
        "SageMaker: asks for the credentials of a private registry",
    ),
    Reason(EXECUTION, "ConnectShells", "container: the agent of Systems Manager, for a shell"),
    Reason(SUBMIT, "UseTrainingPlans", "SageMaker: a job of a training plan uses its capacity"),
    Reason(SUBMIT, "OpenShells", "`aws ssm start-session`: a shell in a container"),
    Reason(SUBMIT, "EndShells", "`aws ssm start-session`: the end of a shell"),
    Reason(
        EXECUTION, "WriteMetrics", "SageMaker: `MetricDefinitions` become metrics of CloudWatch"
    ),
    Reason(EXECUTION, "LogToMlflow", "container: MLflow's client logs a Task"),
    Reason(EXECUTION, "CallMlflowApps", "container: every call of a serverless MLflow app"),
    Reason(EXECUTION, "WriteMlflowArtifacts", "container: MLflow's client writes the plan"),
    Reason(EXECUTION, "LogInToRegistry", "SageMaker: pulls the image"),
    Reason(EXECUTION, "PullImage", "SageMaker: pulls the image"),
    Reason(RECOVERY, "UseTrainingPlans", "SageMaker: a job of a training plan uses its capacity"),
    Reason(RECOVERY, "RenewCode", "function: uploads code again that is older than 30 days"),
    Reason(
        RECOVERY,
        "FollowJobs",
        "function: looks whose a job is whose creation had no response",
        ("sagemaker:ListTags",),
    ),
    Reason(RECOVERY, "WriteItsLog", "Lambda: writes what the function prints"),
    Reason(EXECUTION, "LookAtNetwork", "SageMaker: network interfaces of the hosts"),
    Reason(EXECUTION, "MakeInterfacesInSubnets", "SageMaker: network interfaces of the hosts"),
    Reason(EXECUTION, "UseInterfacesInSubnets", "SageMaker: network interfaces of the hosts"),
)


_POLICIES = {CLIENT: (SUBMIT, LOOK, DEPLOY), FUNCTION: (RECOVERY,)}
"""The policies of those who call AWS from outside of a training job."""


@dataclass(frozen=True)
class Use:
    """One request of a recorded call, with the decision and the grants that allow it."""

    call: Call
    request: Request
    decision: Decision
    grants: tuple[tuple[str, Grant], ...]


@dataclass(frozen=True)
class Comparison:
    """All requests of the recorded calls, and all grants of the policies."""

    uses: tuple[Use, ...]
    all_grants: tuple[tuple[str, Grant], ...]

    @property
    def denied(self) -> list[Use]:
        """Requests that the policies do not allow."""
        return [use for use in self.uses if use.decision != Decision.ALLOWED]

    @cached_property
    def used(self) -> set[tuple[str, Grant]]:
        """Grants that at least one call needs."""
        return {grant for use in self.uses for grant in use.grants}

    @property
    def unused(self) -> list[tuple[str, Grant]]:
        """Grants that no call needs."""
        return [each for each in self.all_grants if each not in self.used]

    def unexplained(self) -> list[tuple[str, Grant]]:
        """Return the grants that no call needs and that have no reason."""
        return [each for each in self.unused if reason_for(*each) is None]


def reason_for(policy: str, grant: Grant) -> Reason | None:
    """Return the reason for a grant that no call needs, or None."""
    return next((reason for reason in REASONS if reason.covers(policy, grant)), None)


def compare(
    applied: AppliedPolicies,
    requests: Sequence[Document],
    record: Mapping[Call, Call] | None = None,
) -> Comparison:
    """Evaluate every call of the record against the policies of its caller."""
    uses = []
    for call in sorted((read_record() if record is None else record).values()):
        names = _POLICIES.get(call.who, (EXECUTION,))
        for request in requests_of(call, applied, requests):
            allowed = tuple(
                (name, grant)
                for name in names
                for grant in granting(applied.policies[name], request)
            )
            uses.append(Use(call, request, _decide(applied, names, call, request), allowed))
    all_grants = tuple(
        (name, grant) for name in IDENTITY for grant in grants(applied.policies[name])
    )
    return Comparison(tuple(uses), all_grants)


def _decide(
    applied: AppliedPolicies, names: Sequence[str], call: Call, request: Request
) -> Decision:
    decision = decide([applied.policies[name] for name in names], request)
    own = f"arn:aws:s3:::{applied.outputs['bucket']}"
    if (
        decision == Decision.ALLOWED
        and request.action.startswith("s3:")
        and request.resource.startswith(own)
    ):
        if decide([applied.policies["bucket"]], request) == Decision.EXPLICIT:
            return Decision.EXPLICIT
        # The container reaches S3 through the VPC endpoint.
        if call.who not in _POLICIES and "s3_endpoint" in applied.policies:
            return decide([applied.policies["s3_endpoint"]], request)
    return decision


def plan_requests(applied: AppliedPolicies, root: str = "module") -> list[Document]:
    """Return CreateTrainingJob documents, planned offline with the outputs of a Terraform root as settings."""
    import cloudtrain
    from cloudtrain.settings.settings import Settings

    settings = Settings(
        **{
            name: tuple(value) if isinstance(value, list) else value
            for name, value in applied.outputs.items()
        }
    )
    found = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.py").write_text("print('hello')\n")
        for lines in _CLUSTERS[root]:
            path = Path(folder) / "job.yaml"
            path.write_text(_JOB.format(cluster=lines))
            found.append(dict(cloudtrain.plan(path, settings=settings).request))
    return found


_JOB = "name: first\ncode: {{directory: ., script: train.py}}\ncluster: {{{cluster}}}\nlimits: {{runtime: 1h}}\n"
_USUAL = (
    "instance_type: ml.g5.xlarge, instances: 2",
    "instance_type: ml.m5.xlarge, instances: 1",
    "instance_type: ml.p4d.24xlarge, instances: 2, spot: true",
)
_CLUSTERS = {
    "module": _USUAL,
    "minimal": _USUAL,
    "existing-vpc": (
        "instance_type: ml.m5.2xlarge, instances: 2, network: {encrypt_traffic: true}",
        "instance_type: ml.g5.12xlarge, instances: 1, network: {encrypt_traffic: true}",
    ),
}
