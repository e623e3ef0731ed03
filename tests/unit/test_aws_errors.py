"""Which errors of botocore are outages, through which following and polling wait."""

import pytest
from botocore import exceptions

from cloudtrain.aws.errors import aws_errors
from cloudtrain.errors import CloudError, UnreachableError

URL = "https://logs.us-west-2.amazonaws.com/"


@pytest.mark.parametrize(
    "error",
    [
        exceptions.EndpointConnectionError(endpoint_url=URL),
        exceptions.ConnectTimeoutError(endpoint_url=URL),
        exceptions.ProxyConnectionError(proxy_url=URL),
        exceptions.SSLError(endpoint_url=URL, error="the certificate of a hotel"),
        exceptions.ReadTimeoutError(endpoint_url=URL),
        exceptions.ConnectionClosedError(endpoint_url=URL),
        exceptions.IncompleteReadError(actual_bytes=1, expected_bytes=2),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_connection_that_fails_is_an_outage(error: Exception) -> None:
    with (
        pytest.raises(UnreachableError, match="could not read the log"),
        aws_errors("read the log"),
    ):
        raise error


def test_a_mistake_in_a_call_is_no_outage() -> None:
    with pytest.raises(CloudError) as caught, aws_errors("read the log"):
        raise exceptions.ParamValidationError(report="Unknown parameter")
    assert not isinstance(caught.value, UnreachableError)
