"""SageMaker's operations on models, endpoint configurations and endpoints, whose models really run.

Requests are validated by AWS's model in the installed botocore, and by rules between fields from the API reference.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from cloudtrain.backends.sandbox.endpoint_runner import EndpointRunner, RunnerFiles
from cloudtrain.backends.sandbox.request_validation import ServiceError, check_model, check_role, validation_error
from cloudtrain.backends.sandbox.training_job import ACCOUNT, Clock
from cloudtrain.support.s3_uri import split_uri

Document = Mapping[str, Any]
_TABLES = {"Model": "model", "EndpointConfig": "endpoint-config", "Endpoint": "endpoint"}
_MAX_PAGE = 100


class Endpoints:
    """The models, endpoint configurations and endpoints of an account.

    Args:
        region: Its region.
        clock: Callback that returns the time in seconds since the epoch.
        get_trust_policy: Callback that returns the trust policy (JSON) of a role ARN; None if the role does not exist.
        files: What the processes of endpoints need.
    """

    def __init__(
        self, region: str, clock: Clock, *, get_trust_policy: Callable[[str], str | None], files: RunnerFiles
    ) -> None:
        self._region = region
        self._clock = clock
        self._get_trust_policy = get_trust_policy
        self._files = files
        self._lock = threading.RLock()
        self._found: dict[str, dict[str, dict[str, Any]]] = {kind: {} for kind in _TABLES}
        self._runners: dict[str, EndpointRunner] = {}
        self._operations: dict[str, Callable[[Document], Document]] = {
            "CreateModel": self._create_model,
            "CreateEndpointConfig": self._create_config,
            "CreateEndpoint": self._create_endpoint,
            "DescribeEndpoint": self._describe_endpoint,
            "DeleteEndpoint": self._delete_endpoint,
        }
        for kind in _TABLES:
            self._operations.setdefault(f"Describe{kind}", self._describer(kind))
            self._operations.setdefault(f"Delete{kind}", self._deleter(kind))
            self._operations[f"List{kind}s"] = self._lister(kind)

    def can_handle(self, operation: str, document: Document) -> bool:
        """Whether an operation concerns endpoints."""
        if operation == "ListTags":
            return any(f":{part}/" in str(document.get("ResourceArn", "")) for part in _TABLES.values())
        return operation in self._operations

    def handle(self, operation: str, document: Document) -> Document:
        """Execute an operation; return its response.

        Raises:
            ServiceError: SageMaker would reject the request.
        """
        with self._lock:
            if operation == "ListTags":
                return self._list_tags(document)
            return self._operations[operation](document)

    def invoke(self, name: str, body: bytes, content_type: str, accept: str) -> tuple[int, bytes, str]:
        """Send a request to an endpoint's model; return status, content and type of its answer.

        Raises:
            ServiceError: there is no such endpoint, or it is not in service.
        """
        runner = self._runners.get(name)
        if runner is None:
            raise ServiceError("ValidationError", f"Endpoint {name} of account {ACCOUNT} not found.")
        if runner.status != "InService":
            raise ServiceError("ValidationError", f"Endpoint {name} is not in service: it is {runner.status}.")
        return runner.invoke(body, content_type, accept)

    def _create_model(self, request: Document) -> Document:
        check_model(request, "CreateModelInput")
        container = request.get("PrimaryContainer")
        if container is None or "Containers" in request:
            raise validation_error("cloudtrain sandbox: a model needs PrimaryContainer; Containers are not supported")
        if "Image" not in container:
            raise validation_error("Requested image not found: Image must be specified in PrimaryContainer")
        if "ExecutionRoleArn" not in request:
            raise validation_error("ExecutionRoleArn must be specified")
        role = str(request["ExecutionRoleArn"])
        check_role({"RoleArn": role}, self._get_trust_policy(role))
        self._require_data(container)
        return self._add("Model", request)

    def _require_data(self, container: Document) -> None:
        from botocore.exceptions import ClientError

        uri = container.get("ModelDataUrl")
        if uri is None:
            return
        bucket, key = split_uri(str(uri))
        try:
            self._files.s3.head_object(Bucket=bucket, Key=key)
        except ClientError:
            raise validation_error(f"Could not find model data at {uri}.") from None

    def _create_config(self, request: Document) -> Document:
        check_model(request, "CreateEndpointConfigInput")
        variants = request["ProductionVariants"]
        if len(variants) != 1:
            raise validation_error("cloudtrain sandbox: an endpoint has one production variant")
        variant = variants[0]
        if variant.get("ModelName") not in self._found["Model"]:
            raise validation_error(f'Could not find model "{self._arn("Model", str(variant.get("ModelName")))}".')
        is_serverless = "ServerlessConfig" in variant
        has_instances = "InstanceType" in variant and "InitialInstanceCount" in variant
        if is_serverless == has_instances or (is_serverless and "InstanceType" in variant):
            raise validation_error(
                "ProductionVariant must have InstanceType and InitialInstanceCount, or ServerlessConfig, and only one "
                "of them"
            )
        if is_serverless and ("KmsKeyId" in request or "VpcConfig" in self._found["Model"][variant["ModelName"]]):
            raise validation_error("VpcConfig and KmsKeyId are not supported for serverless endpoints")
        return self._add("EndpointConfig", request)

    def _create_endpoint(self, request: Document) -> Document:
        check_model(request, "CreateEndpointInput")
        config = self._found["EndpointConfig"].get(request["EndpointConfigName"])
        if config is None:
            arn = self._arn("EndpointConfig", str(request["EndpointConfigName"]))
            raise validation_error(f'Could not find endpoint configuration "{arn}".')
        response = self._add("Endpoint", request)
        name, variant = str(request["EndpointName"]), config["ProductionVariants"][0]
        model = self._found["Model"].get(variant["ModelName"], {})
        uri = model.get("PrimaryContainer", {}).get("ModelDataUrl", "")
        self._runners[name] = EndpointRunner(name, str(variant["VariantName"]), uri, self._files)
        self._runners[name].start()
        return response

    def _describe_endpoint(self, request: Document) -> Document:
        found = self._find("Endpoint", request)
        runner = self._runners[found["EndpointName"]]
        if runner.status == "Deleted":
            del self._found["Endpoint"][found["EndpointName"]], self._runners[found["EndpointName"]]
            return self._find("Endpoint", request)
        config = self._found["EndpointConfig"].get(found["EndpointConfigName"], {"ProductionVariants": []})
        variants = [
            {
                "VariantName": each["VariantName"],
                "CurrentWeight": each.get("InitialVariantWeight", 1.0),
                **_capacity(each),
            }
            for each in config["ProductionVariants"]
        ]
        reason = {"FailureReason": runner.reason[:1024]} if runner.reason else {}
        shown = {name: value for name, value in found.items() if name != "Tags"}
        return {**shown, "EndpointStatus": runner.status, "ProductionVariants": variants, **reason}

    def _delete_endpoint(self, request: Document) -> Document:
        name = self._find("Endpoint", request)["EndpointName"]
        if self._runners[name].status == "Creating":
            raise validation_error(f'Cannot update in-progress endpoint "{self._arn("Endpoint", name)}".')
        self._runners[name].delete()
        return {}

    def _describer(self, kind: str) -> Callable[[Document], Document]:
        return lambda request: {
            name: value for name, value in self._find(kind, request).items() if name not in ("Tags", "LastModifiedTime")
        }

    def _deleter(self, kind: str) -> Callable[[Document], Document]:
        def delete(request: Document) -> Document:
            found = self._find(kind, request)
            del self._found[kind][found[f"{kind}Name"]]
            return {}

        return delete

    def _lister(self, kind: str) -> Callable[[Document], Document]:
        fields = (f"{kind}Name", f"{kind}Arn", "CreationTime", "LastModifiedTime")

        def list_all(request: Document) -> Document:
            part = str(request.get("NameContains", "")).lower()
            found = [each for name, each in self._found[kind].items() if part in name.lower()]
            found = sorted(found, key=lambda each: -each["CreationTime"])
            if kind == "Endpoint":
                found = [each for each in found if self._runners[each["EndpointName"]].status != "Deleted"]
            start = int(request.get("NextToken", "0"))
            page = found[start : start + int(request.get("MaxResults", 10))]
            more = {"NextToken": str(start + len(page))} if start + len(page) < len(found) else {}
            return {f"{kind}s": [self._summary(kind, each, fields) for each in page], **more}

        return list_all

    def _summary(self, kind: str, found: Document, fields: tuple[str, ...]) -> Document:
        summary = {name: found[name] for name in fields if kind == "Endpoint" or name != "LastModifiedTime"}
        if kind == "Endpoint":
            summary["EndpointStatus"] = self._runners[found["EndpointName"]].status
        return summary

    def _add(self, kind: str, request: Document) -> Document:
        name = str(request[f"{kind}Name"])
        arn, found = self._arn(kind, name), self._found[kind].get(name)
        if found is not None and not (kind == "Endpoint" and self._runners[name].status == "Deleted"):
            label = {"Model": "model", "EndpointConfig": "endpoint configuration", "Endpoint": "endpoint"}[kind]
            raise validation_error(f'Cannot create already existing {label} "{arn}".')
        now = self._clock()
        self._found[kind][name] = {**request, f"{kind}Arn": arn, "CreationTime": now, "LastModifiedTime": now}
        return {f"{kind}Arn": arn}

    def _find(self, kind: str, request: Document) -> dict[str, Any]:
        name = str(request.get(f"{kind}Name"))
        found = self._found[kind].get(name)
        if found is None:
            label = {"Model": "model", "EndpointConfig": "endpoint configuration", "Endpoint": "endpoint"}[kind]
            raise validation_error(f'Could not find {label} "{self._arn(kind, name)}".')
        return found

    def _list_tags(self, request: Document) -> Document:
        arn = str(request["ResourceArn"])
        every = [each for kind in _TABLES for each in self._found[kind].values() if arn == each[f"{kind}Arn"]]
        if not every:
            raise validation_error(f"Could not find resource {arn}.")
        return {"Tags": every[0].get("Tags", [])}

    def _arn(self, kind: str, name: str) -> str:
        return f"arn:aws:sagemaker:{self._region}:{ACCOUNT}:{_TABLES[kind]}/{name.lower()}"


def _capacity(variant: Document) -> Document:
    if "ServerlessConfig" in variant:
        return {"CurrentServerlessConfig": variant["ServerlessConfig"]}
    count = variant["InitialInstanceCount"]
    return {"CurrentInstanceCount": count, "DesiredInstanceCount": count}
