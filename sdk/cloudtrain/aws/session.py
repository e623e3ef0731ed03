"""boto3 sessions: one of this environment, and one that ignores the environment and AWS's files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cloudtrain.aws.retry import client_retries
from cloudtrain.support.proxies import is_loopback, proxy_variable_for

if TYPE_CHECKING:
    from boto3.session import Session

NO_SHARED_FILES: Mapping[str, str] = {
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}
"""Variables with which AWS's SDKs and its command line read no profile."""


def make_session(**options: Any) -> Session:
    """Return a boto3 session of this environment and AWS's files.

    Its requests to an endpoint on this machine, such as that of a sandbox, go through no proxy.

    Args:
        options: Options of `boto3.Session`.

    Raises:
        botocore.exceptions.BotoCoreError: The profile does not exist, or a file cannot be read.
    """
    import boto3
    from botocore.config import Config

    class DirectSession(boto3.Session):
        def client(self, *arguments: Any, **given: Any) -> Any:
            made = super().client(*arguments, **given)
            url = made.meta.endpoint_url
            if not is_loopback(url) or not proxy_variable_for(url):
                return made
            config = given.get("config") or Config(retries=client_retries())
            direct = config.merge(Config(proxies={}))
            return super().client(*arguments, **{**given, "config": direct})

    return DirectSession(**options)


def make_isolated_session(endpoint: str, key_id: str, secret: str, region: str) -> Session:
    """Return a boto3 session for an endpoint on this machine: no proxy, no profile, no variable, no file of AWS.

    Args:
        endpoint: URL that all its clients use, even if their caller gives another one.
        key_id: Id of the access key.
        secret: The access key's secret.
        region: Name of the region.
    """
    import boto3
    from botocore.config import Config
    from botocore.session import Session as BotocoreSession

    # Each variable of botocore without its name in a profile and in the environment.
    variables = {
        name: (None, None, default, convert)
        for name, (_, _, default, convert) in BotocoreSession.SESSION_VARIABLES.items()
    }
    for name in ("config_file", "credentials_file"):
        variables[name] = (None, None, os.devnull, None)
    own = BotocoreSession(session_vars=variables)
    own.set_default_client_config(Config(proxies={}))

    class LocalSession(boto3.Session):
        # The SageMaker SDK gives an endpoint of its own for STS, and calls `resource`, too.
        def client(self, *arguments: Any, **given: Any) -> Any:
            return super().client(*arguments, **{**given, "endpoint_url": endpoint})

        def resource(self, *arguments: Any, **given: Any) -> Any:
            return super().resource(*arguments, **{**given, "endpoint_url": endpoint})

    return LocalSession(
        aws_access_key_id=key_id,
        aws_secret_access_key=secret,
        region_name=region,
        botocore_session=own,
    )
