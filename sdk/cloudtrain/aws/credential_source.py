"""The source of AWS credentials, found without a network call and without starting a program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_KEY_VARIABLE = "AWS_ACCESS_KEY_ID"
_TOKEN_VARIABLE = "AWS_WEB_IDENTITY_TOKEN_FILE"  # noqa: S105 (no password)
_VARIABLES = {_KEY_VARIABLE: "an access key", _TOKEN_VARIABLE: "a web identity"}
_CONTAINER_VARIABLES = {
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI": "the container's role",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI": "the container's role",
}
"""AWS's SDK reads them only where the profile has no credentials."""
_PROFILE_KEYS = {
    "web_identity_token_file": "a web identity",
    "role_arn": "a role",
    "sso_session": "AWS SSO",
    "sso_start_url": "AWS SSO",
    "aws_access_key_id": "an access key",
    "login_session": "aws login",
    "credential_process": "a program",
}


@dataclass(frozen=True)
class CredentialSource:
    """Where credentials come from; its text is such as `AWS SSO, from profile dev of AWS`.

    Attributes:
        kind: What they are, such as `an access key`.
        variable: The variable that gives them, or None.
        profile: The profile of AWS that gives them, or None.
    """

    kind: str
    variable: str | None = None
    profile: str | None = None

    def __str__(self) -> str:
        place = f"profile {self.profile} of AWS" if self.variable is None else self.variable
        return f"{self.kind}, from {place}"


def find_credential_source(environ: Mapping[str, str]) -> CredentialSource | None:
    """Return the source of the configured credentials, or None. They may be invalid or expired.

    The role of an EC2 instance is not found, because that needs a request to the instance's metadata.

    Raises:
        BotoCoreError: AWS's configuration is malformed, or the selected profile does not exist.
    """
    from botocore.session import Session

    for variable, kind in _VARIABLES.items():
        if environ.get(variable):
            return CredentialSource(kind, variable=variable)
    session = Session()
    profile: Mapping[str, object] = session.get_scoped_config()
    for key, kind in _PROFILE_KEYS.items():
        if profile.get(key):
            return CredentialSource(kind, profile=session.profile or "default")
    for variable, kind in _CONTAINER_VARIABLES.items():
        if environ.get(variable):
            return CredentialSource(kind, variable=variable)
    return None
