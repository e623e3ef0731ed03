"""Check of the credentials."""

from __future__ import annotations

from collections.abc import Iterator

from cloudtrain.preflight.base import (
    SIGN_IN_HINT,
    Account,
    Check,
    error_code,
    failed,
    has_invalid_credentials,
    passed,
)


def check_identity(context: Account) -> Iterator[Check]:
    """Check that AWS accepts the credentials and that they belong to the role's account."""
    from botocore.exceptions import ClientError

    try:
        caller = context.caller
    except ClientError as error:
        if not has_invalid_credentials(error):
            raise
        yield failed("identity", f"AWS rejected the credentials: {error_code(error)}", SIGN_IN_HINT)
        return
    arn, account = caller["Arn"], caller["Account"]
    wanted = context.settings.account
    if wanted is not None and wanted != account:
        yield failed(
            "identity",
            f"signed in to account {account} as {arn}; the role belongs to account {wanted}, "
            "and a role cannot be passed to SageMaker from another account",
            f"sign in to account {wanted}, or set CLOUDTRAIN_ROLE to a role of account {account}",
        )
        return
    yield passed("identity", f"{arn}, account {account}")
