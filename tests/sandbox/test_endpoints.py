"""Models, endpoint configurations and endpoints in the sandbox through clients of AWS.

What runs behind them is tested with models that really answer: test_served_models.py.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable
from typing import Any

import pytest
from botocore.exceptions import ClientError
from support.jobs import until
from support.sandboxes import Served, model_of, unknown_fields

pytestmark = [pytest.mark.processes, pytest.mark.aws]

IMAGE = "763104351884.dkr.ecr.us-west-2.amazonaws.com/ray:serve-ml-sagemaker-cpu-v1"
INSTANCES = {"InstanceType": "ml.m5.xlarge", "InitialInstanceCount": 1}


def refusal(call: Callable[..., Any], **request: Any) -> str:
    with pytest.raises(ClientError) as refused:
        call(**request)
    return str(refused.value)


def create_model(sandbox: Served, name: str) -> None:
    sandbox.client("s3").put_object(
        Bucket=sandbox.info["bucket"], Key="model.tar.gz", Body=b"no archive"
    )
    uri = f"s3://{sandbox.info['bucket']}/model.tar.gz"
    container = {"Image": IMAGE, "ModelDataUrl": uri}
    client = sandbox.client("sagemaker")
    client.create_model(
        ModelName=name, PrimaryContainer=container, ExecutionRoleArn=sandbox.info["role"]
    )


def sent(sandbox: Served, operation: str, request: dict[str, Any]) -> tuple[int, Any]:
    """Send a request as its JSON document; return status and response."""
    headers = {
        "X-Amz-Target": f"SageMaker.{operation}",
        "Content-Type": "application/x-amz-json-1.1",
        "Authorization": sandbox.authorization,
    }
    connection = http.client.HTTPConnection("127.0.0.1", sandbox.port, timeout=60)
    connection.request("POST", "/", json.dumps(request), headers)
    response = connection.getresponse()
    found = response.status, json.loads(response.read())
    connection.close()
    return found


def variants(model: str, **fields: Any) -> list[dict[str, Any]]:
    return [{"VariantName": "main", "ModelName": model, **fields}]


def test_invalid_requests_are_refused_as_by_aws(sandbox: Served) -> None:
    client, role = sandbox.client("sagemaker"), sandbox.info["role"]
    missing = {"Image": IMAGE, "ModelDataUrl": f"s3://{sandbox.info['bucket']}/nothing.tar.gz"}
    message = refusal(
        client.create_model, ModelName="a", PrimaryContainer=missing, ExecutionRoleArn=role
    )
    assert "Could not find model data at" in message
    message = refusal(
        client.create_model, ModelName="a_b", PrimaryContainer=missing, ExecutionRoleArn=role
    )
    assert "Value at 'modelName' failed to satisfy constraint: 'a_b'" in message
    create_model(sandbox, "refused")
    config = client.create_endpoint_config
    both = variants(
        "refused", **INSTANCES, ServerlessConfig={"MemorySizeInMB": 1024, "MaxConcurrency": 1}
    )
    assert "only one of them" in refusal(config, EndpointConfigName="c", ProductionVariants=both)
    unknown = variants("nothing", **INSTANCES)
    assert "Could not find model" in refusal(
        config, EndpointConfigName="c", ProductionVariants=unknown
    )
    large = variants("refused", ServerlessConfig={"MemorySizeInMB": 9999, "MaxConcurrency": 1})
    assert "AWS allows at most 6144" in refusal(
        config, EndpointConfigName="c", ProductionVariants=large
    )
    message = refusal(client.create_endpoint, EndpointName="e", EndpointConfigName="nothing")
    assert "Could not find endpoint configuration" in message
    assert "Could not find endpoint" in refusal(client.describe_endpoint, EndpointName="e")


def test_an_endpoint_without_a_package_fails_with_the_reason(sandbox: Served) -> None:
    client = sandbox.client("sagemaker")
    create_model(sandbox, "broken")
    client.create_endpoint_config(
        EndpointConfigName="broken", ProductionVariants=variants("broken", **INSTANCES)
    )
    client.create_endpoint(
        EndpointName="broken", EndpointConfigName="broken", Tags=[{"Key": "a", "Value": "b"}]
    )
    message = refusal(client.create_endpoint, EndpointName="broken", EndpointConfigName="broken")
    assert "Cannot create already existing endpoint" in message
    described = until(
        lambda: (
            (found := client.describe_endpoint(EndpointName="broken"))["EndpointStatus"]
            != "Creating"
            and found
        )
    )
    assert described["EndpointStatus"] == "Failed"
    assert "cannot be unpacked" in described["FailureReason"]
    runtime = sandbox.client("sagemaker-runtime")
    assert "is not in service" in refusal(
        runtime.invoke_endpoint, EndpointName="broken", Body=b"{}"
    )
    assert [each["EndpointName"] for each in client.list_endpoints()["Endpoints"]] == ["broken"]
    assert client.list_tags(ResourceArn=described["EndpointArn"])["Tags"] == [
        {"Key": "a", "Value": "b"}
    ]
    client.delete_endpoint(EndpointName="broken")
    until(lambda: client.list_endpoints()["Endpoints"] == [])
    assert "Could not find endpoint" in refusal(client.describe_endpoint, EndpointName="broken")


def test_responses_have_only_members_of_awss_model(sandbox: Served) -> None:
    client = sandbox.client("sagemaker")
    create_model(sandbox, "shape")
    client.create_endpoint_config(
        EndpointConfigName="shape", ProductionVariants=variants("shape", **INSTANCES)
    )
    client.create_endpoint(EndpointName="shape", EndpointConfigName="shape")
    for operation, request in (
        ("DescribeModel", {"ModelName": "shape"}),
        ("DescribeEndpointConfig", {"EndpointConfigName": "shape"}),
        ("DescribeEndpoint", {"EndpointName": "shape"}),
        ("ListModels", {}),
        ("ListEndpointConfigs", {}),
        ("ListEndpoints", {}),
    ):
        status, response = sent(sandbox, operation, request)
        assert status == 200, response
        assert unknown_fields(response, model_of(operation).output_shape) == [], operation
