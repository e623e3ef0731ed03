"""Proxies of the environment: requests to this machine need none, and errors name their variable."""

from typing import Any

import pytest
from botocore import exceptions
from botocore.config import Config
from urllib3.exceptions import ProxyError

from cloudtrain.aws.errors import aws_errors
from cloudtrain.aws.s3_download import make_s3_client_of
from cloudtrain.aws.session import NO_SHARED_FILES, make_isolated_session, make_session
from cloudtrain.errors import CloudError
from cloudtrain.support.proxies import exclude_loopback, proxy_variable_for

PROXY = "http://127.0.0.1:9"
HERE = "http://127.0.0.1:1"
AWS = "https://sts.us-west-2.amazonaws.com/"
KEY = ("AKIAEXAMPLE", "example", "us-west-2")
ONCE = Config(retries={"total_max_attempts": 1})


@pytest.fixture(autouse=True)
def proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set proxies for every address."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTP_PROXY", PROXY)
    monkeypatch.setenv("HTTPS_PROXY", PROXY)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"NO_PROXY": "corp"}, None),
        ({"http_proxy": ""}, None),
        ({"HTTP_PROXY": PROXY}, "127.0.0.1,localhost"),
        ({"all_proxy": PROXY, "NO_PROXY": "corp, localhost"}, "corp,localhost,127.0.0.1"),
        ({"https_proxy": PROXY, "no_proxy": ".corp", "NO_PROXY": "x"}, ".corp,127.0.0.1,localhost"),
        ({"https_proxy": PROXY, "no_proxy": "*"}, "*"),
    ],
)
def test_this_machine_is_added_to_no_proxy(environ: dict[str, str], expected: str | None) -> None:
    names = () if expected is None else ("no_proxy", "NO_PROXY")
    assert exclude_loopback(environ) == dict.fromkeys(names, expected)


@pytest.mark.parametrize(
    ("environ", "url", "variable"),
    [
        ({"HTTPS_PROXY": PROXY}, AWS, "HTTPS_PROXY"),
        ({"HTTPS_PROXY": PROXY, "https_proxy": PROXY}, AWS, "https_proxy"),
        ({"HTTP_PROXY": PROXY}, AWS, ""),
        ({"HTTPS_PROXY": PROXY, "NO_PROXY": ".amazonaws.com"}, AWS, ""),
        ({"HTTPS_PROXY": PROXY, "NO_PROXY": "*"}, AWS, ""),
        ({"HTTPS_PROXY": PROXY}, "", ""),
    ],
)
def test_the_variable_of_an_address(
    environ: dict[str, str], url: str, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HTTP_PROXY")
    monkeypatch.delenv("HTTPS_PROXY")
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert proxy_variable_for(url) == variable


def clients(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return clients of an endpoint on this machine, at which nothing listens."""
    isolated = make_isolated_session(HERE, *KEY)
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION")
    environ = {**dict(zip(names, KEY, strict=True)), "AWS_ENDPOINT_URL": HERE, **NO_SHARED_FILES}
    made = [
        isolated.client("sts", config=ONCE),
        isolated.client("sts", endpoint_url=AWS, config=ONCE),
        isolated.resource("s3", config=ONCE).meta.client,
        make_s3_client_of(environ),
    ]
    monkeypatch.delenv("AWS_PROFILE")
    monkeypatch.delenv("AWS_USE_FIPS_ENDPOINT")
    monkeypatch.setenv("AWS_ENDPOINT_URL", HERE)
    key = {"aws_access_key_id": KEY[0], "aws_secret_access_key": KEY[1]}
    own = make_session(region_name=KEY[2], **key)
    return [*made, own.client("sts", config=ONCE), own.resource("s3", config=ONCE).meta.client]


def test_requests_to_this_machine_go_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setenv("AWS_PROFILE", "missing")
    monkeypatch.setenv("AWS_USE_FIPS_ENDPOINT", "true")
    for client in clients(monkeypatch):
        call = (
            client.list_buckets if hasattr(client, "list_buckets") else client.get_caller_identity
        )
        with pytest.raises(exceptions.EndpointConnectionError, match=HERE):
            call()


def test_requests_to_aws_use_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", PROXY.replace("//", "//user:word@"))
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    monkeypatch.delenv("HTTP_PROXY")
    key = {"aws_access_key_id": KEY[0], "aws_secret_access_key": KEY[1]}
    client = make_session(region_name=KEY[2], **key).client("sts", config=ONCE)
    with pytest.raises(CloudError) as caught, aws_errors("find the account"):
        client.get_caller_identity()
    assert "http://***:***@127.0.0.1:9" in caught.value.message
    assert "requests go through the proxy of HTTPS_PROXY: correct it" in caught.value.hint


@pytest.mark.parametrize(
    ("error", "message", "hint"),
    [
        (
            exceptions.ProxyConnectionError(
                proxy_url=PROXY, error=ProxyError("x", OSError("Tunnel connection failed: 403"))
            ),
            f'could not try: Failed to connect to proxy URL: "{PROXY}" (Tunnel connection failed: 403)',
            "check the network, the region and AWS_ENDPOINT_URL; requests go through the proxy of HTTPS_PROXY",
        ),
        (
            exceptions.ConnectTimeoutError(endpoint_url=AWS),
            f'could not try: Connect timeout on endpoint URL: "{AWS}"',
            "check the network, the region and AWS_ENDPOINT_URL; requests go through the proxy of HTTPS_PROXY",
        ),
        (
            exceptions.SSLError(endpoint_url=AWS, error="self-signed certificate"),
            f"could not try: SSL validation failed for {AWS} self-signed certificate",
            "check the network, the region and AWS_ENDPOINT_URL; requests go through the proxy of HTTPS_PROXY",
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_hint_names_the_variable(error: Exception, message: str, hint: str) -> None:
    with pytest.raises(CloudError) as caught, aws_errors("try"):
        raise error
    assert caught.value.message == message
    assert caught.value.hint.startswith(hint)


def test_no_proxy_is_blamed_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", ".amazonaws.com")
    with pytest.raises(CloudError) as caught, aws_errors("try"):
        raise exceptions.ConnectTimeoutError(endpoint_url=AWS)
    assert "proxy" not in caught.value.hint
