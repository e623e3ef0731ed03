"""SageMaker's operations on models, endpoint configurations and endpoints, whose models really run.

Requests are validated by AWS's model in the installed botocore, and by rules between fields from the API reference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cloudtrain.backends.sandbox.endpoint_runner import EndpointRunner
from cloudtrain.backends.sandbox.job_runner import RunnerEnvironment
from cloudtrain.backends.sandbox.process import ACCOUNT
from cloudtrain.backends.sandbox.request_validation import (
    ServiceError,
    check_model,
    check_role,
    validation_error,
)
from cloudtrain.backends.sandbox.resources import Document, Operations, Resources
from cloudtrain.backends.sandbox.training_job import FAILURE_CHARACTERS, Clock
from cloudtrain.support.s3_uri import split_uri


@dataclass
class _Resource:
    """A model, an endpoint configuration or an endpoint, which has a runner."""

    kind: str
    arn: str
    request: Document
    created: float
    runner: EndpointRunner | None = None

    def __post_init__(self) -> None:
        self.name = str(self.request[f"{self.kind}Name"])
        self.tags = list(self.request.get("Tags", ()))

    def describe(self) -> dict[str, Any]:
        """Return the response to its describing operation."""
        shown = {name: value for name, value in self.request.items() if name != "Tags"}
        return {**shown, **self.summary()}

    def summary(self) -> dict[str, Any]:
        """Return its entry in a list."""
        summary = {
            f"{self.kind}Name": self.name,
            f"{self.kind}Arn": self.arn,
            "CreationTime": self.created,
        }
        if self.runner is not None:
            summary |= {"LastModifiedTime": self.created, "EndpointStatus": self.runner.status}
        return summary


def _resources(kind: str, label: str, name: str) -> Resources[_Resource]:
    code = "ValidationException"
    taken = f'Cannot create already existing {name} "{{arn}}".'
    missing = f'Could not find {name} "{{arn}}".'
    return Resources(kind, label, taken=(code, taken), missing=(code, missing))


class Endpoints:
    """The models, endpoint configurations and endpoints of an account.

    Args:
        clock: Callback that returns the time in seconds since the epoch.
        get_trust_policy: Callback that returns the trust policy (JSON) of a role ARN; None if the role does not exist.
        shared: What the processes of endpoints need.
    """

    def __init__(
        self, clock: Clock, get_trust_policy: Callable[[str], str | None], shared: RunnerEnvironment
    ) -> None:
        self._clock = clock
        self._get_trust_policy = get_trust_policy
        self._shared = shared
        self._models = _resources("Model", "model", "model")
        self._configs = _resources("EndpointConfig", "endpoint config", "endpoint configuration")
        self._endpoints = _resources("Endpoint", "endpoint", "endpoint")
        self.collections = (self._models, self._configs, self._endpoints)
        self.operations: Operations = {
            **{
                name: handle
                for each in self.collections
                for name, handle in _common_operations(each).items()
            },
            "CreateModel": self._create_model,
            "CreateEndpointConfig": self._create_config,
            "CreateEndpoint": self._create_endpoint,
            "DescribeEndpoint": self._describe_endpoint,
            "DeleteEndpoint": self._delete_endpoint,
        }

    def invoke(
        self, name: str, body: bytes, content_type: str, accept: str
    ) -> tuple[int, bytes, str]:
        """Send a request to an endpoint's model; return status, content and type of its answer.

        Raises:
            ServiceError: there is no such endpoint, or it is not in service.
        """
        endpoint = self._endpoints.get(name)
        runner = None if endpoint is None else endpoint.runner
        if runner is None:
            raise ServiceError(
                "ValidationError", f"Endpoint {name} of account {ACCOUNT} not found."
            )
        if runner.status != "InService":
            raise ServiceError(
                "ValidationError", f"Endpoint {name} is not in service: it is {runner.status}."
            )
        return runner.invoke(body, content_type, accept)

    def _create_model(self, request: Document) -> Document:
        check_model(request, "CreateModelInput")
        container = request.get("PrimaryContainer")
        if container is None or "Containers" in request:
            raise validation_error(
                "cloudtrain sandbox: a model needs PrimaryContainer; Containers are not supported"
            )
        if "Image" not in container:
            raise validation_error(
                "Requested image not found: Image must be specified in PrimaryContainer"
            )
        if "ExecutionRoleArn" not in request:
            raise validation_error("ExecutionRoleArn must be specified")
        role = str(request["ExecutionRoleArn"])
        check_role({"RoleArn": role}, self._get_trust_policy(role))
        self._require_data(container)
        return self._add(self._models, request)

    def _require_data(self, container: Document) -> None:
        from botocore.exceptions import ClientError

        uri = container.get("ModelDataUrl")
        if uri is None:
            return
        bucket, key = split_uri(str(uri))
        try:
            self._shared.s3.head_object(Bucket=bucket, Key=key)
        except ClientError:
            raise validation_error(f"Could not find model data at {uri}.") from None

    def _create_config(self, request: Document) -> Document:
        check_model(request, "CreateEndpointConfigInput")
        variants = request["ProductionVariants"]
        if len(variants) != 1:
            raise validation_error("cloudtrain sandbox: an endpoint has one production variant")
        variant = variants[0]
        model = self._models.find(variant)
        is_serverless = "ServerlessConfig" in variant
        has_instances = "InstanceType" in variant and "InitialInstanceCount" in variant
        if is_serverless == has_instances or (is_serverless and "InstanceType" in variant):
            raise validation_error(
                "ProductionVariant must have InstanceType and InitialInstanceCount, or ServerlessConfig, and only one "
                "of them"
            )
        if is_serverless and ("KmsKeyId" in request or "VpcConfig" in model.request):
            raise validation_error(
                "VpcConfig and KmsKeyId are not supported for serverless endpoints"
            )
        return self._add(self._configs, request)

    def _create_endpoint(self, request: Document) -> Document:
        check_model(request, "CreateEndpointInput")
        name = str(request["EndpointName"])
        config = self._configs.find(request)
        variant = config.request["ProductionVariants"][0]
        model = self._models.get(variant["ModelName"])
        uri = ""
        if model is not None:
            uri = model.request["PrimaryContainer"].get("ModelDataUrl", "")
        runner = EndpointRunner(
            name=name,
            variant=str(variant["VariantName"]),
            uri=uri,
            shared=self._shared,
        )
        response = self._add(self._endpoints, request, runner)
        runner.start()
        return response

    def _describe_endpoint(self, request: Document) -> Document:
        found = self._endpoints.find(request)
        config = self._configs.get(found.request["EndpointConfigName"])
        variants = [
            {
                "VariantName": each["VariantName"],
                "CurrentWeight": each.get("InitialVariantWeight", 1.0),
                **_capacity(each),
            }
            for each in (() if config is None else config.request["ProductionVariants"])
        ]
        failure = found.runner.reason[:FAILURE_CHARACTERS] if found.runner is not None else ""
        return {
            **found.describe(),
            "ProductionVariants": variants,
            **({"FailureReason": failure} if failure else {}),
        }

    def _delete_endpoint(self, request: Document) -> Document:
        found = self._endpoints.find(request)
        if found.runner is None or found.runner.status == "Creating":
            raise validation_error(f'Cannot update in-progress endpoint "{found.arn}".')
        if found.runner.status == "Deleting":
            return {}
        found.runner.delete(lambda: self._endpoints.remove(found.name))
        return {}

    def _add(
        self, found: Resources[_Resource], request: Document, runner: EndpointRunner | None = None
    ) -> Document:
        name = str(request[f"{found.kind}Name"])
        arn = found.add(
            _Resource(found.kind, found.arn(name.lower()), request, self._clock(), runner)
        ).arn
        return {f"{found.kind}Arn": arn}


def _common_operations(found: Resources[_Resource]) -> Operations:
    def list_all(request: Document) -> Document:
        page, more = found.page(
            (each.summary() for each in found.all()), request, "CreationTime Descending"
        )
        return {f"{found.kind}s": page, **more}

    def delete(request: Document) -> Document:
        found.remove(found.find(request).name)
        return {}

    return {
        f"Describe{found.kind}": lambda request: found.find(request).describe(),
        f"Delete{found.kind}": delete,
        f"List{found.kind}s": list_all,
    }


def _capacity(variant: Document) -> Document:
    if "ServerlessConfig" in variant:
        return {"CurrentServerlessConfig": variant["ServerlessConfig"]}
    count = variant["InitialInstanceCount"]
    return {"CurrentInstanceCount": count, "DesiredInstanceCount": count}
