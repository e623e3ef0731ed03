"""The source of AWS credentials, found without a network call and without starting a program."""

from __future__ import annotations

from collections.abc import Mapping

from cloudtrain.errors import CloudError

_VARIABLES = {
    "AWS_ACCESS_KEY_ID": "an access key",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI": "the container's role",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI": "the container's role",
    "AWS_WEB_IDENTITY_TOKEN_FILE": "a web identity",
}
_PROFILE_KEYS = {
    "role_arn": "a role",
    "web_identity_token_file": "a web identity",
    "sso_session": "AWS SSO",
    "sso_start_url": "AWS SSO",
    "aws_access_key_id": "an access key",
    "login_session": "aws login",
    "credential_process": "a program",
}


def find_credential_source(environ: Mapping[str, str]) -> str | None:
    """Return the kind and place of the configured credentials, or None. They may be invalid or expired.

    The role of an EC2 instance is not found, because that needs a request to the instance's metadata.

    Raises:
        CloudError: AWS's configuration is malformed, or the selected profile does not exist.
    """
    from botocore.exceptions import BotoCoreError
    from botocore.session import Session

    for variable, kind in _VARIABLES.items():
        if environ.get(variable):
            return f"{kind}, from {variable}"
    session = Session()
    try:
        profile: Mapping[str, object] = session.get_scoped_config()
    except BotoCoreError as error:
        raise CloudError(
            str(error), "correct AWS_PROFILE, or add the profile: aws configure --profile NAME"
        ) from None
    name = session.profile or "default"
    return next(
        (
            f"{kind}, from profile {name} of AWS"
            for key, kind in _PROFILE_KEYS.items()
            if profile.get(key)
        ),
        None,
    )
