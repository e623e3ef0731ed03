"""Values of the job's secrets, fetched from AWS Secrets Manager with the job's role, or locally with the user's.

The launcher uses the standard library only, and its environment must not hold secrets. It starts a separate process,
`python -m cloudtrain_runtime.launcher.secrets`, which reads the references from standard input and writes the values as
one line of JSON to standard output. With `--check` it reports errors only.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cloudtrain_runtime.contract import SecretConfig
from cloudtrain_runtime.contract.aws_codes import DENIED, NOT_ACCEPTED, code_of
from cloudtrain_runtime.contract.redaction import redact, register_values
from cloudtrain_runtime.contract.strict_json import dump_json, load_json
from cloudtrain_runtime.s3.retry import client_retries, is_container_endpoint, open_session

if TYPE_CHECKING:
    from boto3.session import Session

_ATTEMPTS = 6
_CONNECT_SECONDS = 5
_READ_SECONDS = 10
_DETAIL_CHARACTERS = 300


class SecretError(Exception):
    """A secret is not available; the message says why and what to do."""


@dataclass(frozen=True)
class ResolvedSecrets:
    """The values by variable, and one line for each variable without a value."""

    values: Mapping[str, str]
    problems: tuple[str, ...] = ()


def resolve(secrets: Mapping[str, SecretConfig], environ: Mapping[str, str]) -> ResolvedSecrets:
    """Return the value of each variable.

    Throttling and lost connections are retried; a denied or missing secret is not.
    """
    try:
        import boto3  # noqa: F401
    except ImportError:
        names = ", ".join(secrets)
        return ResolvedSecrets(
            {},
            (f"{names}: this image has no boto3, which secrets need: add it to code.requirements",),
        )
    from botocore.exceptions import BotoCoreError

    try:
        session = open_session()
    except (BotoCoreError, ValueError) as error:
        return ResolvedSecrets(
            {}, (f"{', '.join(secrets)}: the secrets {_no_answer(error, None)}",)
        )
    values: dict[str, str] = {}
    problems: list[str] = []
    found: dict[SecretConfig, str] = {}
    for name, reference in secrets.items():
        without_key = dataclasses.replace(reference, key=None)
        try:
            if without_key not in found:
                found[without_key] = _fetch(reference, session, environ)
            values[name] = _pick(found[without_key], reference)
        except SecretError as error:
            problems.append(redact(f"{name}: the secret {reference.secret} {error}"))
    return ResolvedSecrets(values, tuple(problems))


def load_missing(
    secrets: Mapping[str, SecretConfig],
    *,
    on_start: Callable[[subprocess.Popen[Any]], None] | None = None,
) -> ResolvedSecrets:
    """Fetch the variables that the environment does not set, and redact all of them in this process's output.

    `on_start` is called with the fetching process, if one is started.
    """
    register_values(os.environ[name] for name in secrets if name in os.environ)
    wanted = {name: reference for name, reference in secrets.items() if name not in os.environ}
    found = ResolvedSecrets({})
    if wanted:
        found = resolve_in_subprocess(wanted, on_start=on_start)
    register_values(found.values.values())
    return found


def resolve_in_subprocess(
    secrets: Mapping[str, SecretConfig],
    *,
    on_start: Callable[[subprocess.Popen[Any]], None] | None = None,
) -> ResolvedSecrets:
    """Do what `resolve` does, in a separate process."""
    command = [sys.executable, "-m", "cloudtrain_runtime.launcher.secrets"]
    question = dump_json(
        {name: dataclasses.asdict(reference) for name, reference in secrets.items()}
    )
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )
    if on_start is not None:
        on_start(process)
    output, errors = process.communicate(question)
    try:
        answer = load_json(output.splitlines()[-1])
        return ResolvedSecrets(answer["values"], tuple(answer["problems"]))
    except (ValueError, LookupError, TypeError):
        lines = errors.strip().splitlines() or [f"exit code {process.returncode}"]
        last = redact(lines[-1])
        return ResolvedSecrets(
            {}, (f"{', '.join(secrets)}: the secrets could not be fetched: {last}",)
        )


def _fetch(reference: SecretConfig, session: Session, environ: Mapping[str, str]) -> str:
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError

    config = Config(
        retries=client_retries(_ATTEMPTS),
        connect_timeout=_CONNECT_SECONDS,
        read_timeout=_READ_SECONDS,
    )
    stage = {} if reference.stage is None else {"VersionStage": reference.stage}
    region = None
    try:
        region = region_of(reference.secret, session.region_name, environ)
        client = session.client("secretsmanager", region_name=region, config=config)
        answer = client.get_secret_value(SecretId=reference.secret, **stage)
    except ClientError as error:
        raise SecretError(_refusal(error, reference, region)) from None
    except (BotoCoreError, ValueError) as error:
        raise SecretError(_no_answer(error, region)) from None
    text = answer.get("SecretString")
    if text is None:
        raise SecretError("holds bytes, but a variable is text: store it as a string")
    return str(text)


def region_of(secret: str, region: str | None, environ: Mapping[str, str]) -> str | None:
    """Return the region of a secret: from its ARN, or that of the client or of the job."""
    arn = secret.split(":")
    if arn[0] == "arn" and len(arn) > 3:  # noqa: PLR2004 (arn:partition:secretsmanager:region:...)
        return arn[3]
    job = environ.get("TRAINING_JOB_ARN", "").split(":")
    of_job = job[3] if len(job) > 3 and job[3] != "local" else None  # noqa: PLR2004
    return region or environ.get("AWS_REGION") or of_job


def _refusal(error: Any, reference: SecretConfig, region: str | None) -> str:
    code = code_of(error)
    message = str(error.response.get("Error", {}).get("Message", ""))
    detail = " ".join(message.split())[:_DETAIL_CHARACTERS]
    if code == "ResourceNotFoundException":
        stage = "" if reference.stage is None else f" with the stage {reference.stage}"
        return f"is not there{stage} in {region}: create it, or fix its name in code.env ({code}: {detail})"
    if code in DENIED:
        # The ARN of a secret ends with six characters that are not in its name.
        by_name = f"arn:aws:secretsmanager:{region}:<account>:secret:{reference.secret}-??????"
        resource = reference.secret if reference.secret.startswith("arn:") else by_name
        return (
            f"may not be read: the role needs secretsmanager:GetSecretValue on {resource}, and kms:Decrypt on the "
            f"secret's key where it has one of its own ({code}: {detail})"
        )
    if code in NOT_ACCEPTED:
        return (
            f"cannot be read: AWS does not accept the credentials: {_renewal()} ({code}: {detail})"
        )
    if "Decryption" in code:
        return f"cannot be decrypted: the role needs kms:Decrypt on the secret's key ({code}: {detail})"
    return f"cannot be read ({code}: {detail})"


def _no_answer(error: Exception, region: str | None) -> str:
    kind = type(error).__name__
    text = " ".join(str(error).split())[:_DETAIL_CHARACTERS]
    if kind in ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound"):
        return f"cannot be read: there are no credentials: give the job a role, or set AWS_PROFILE ({kind}: {text})"
    if kind == "CredentialRetrievalError":
        return (
            f"cannot be read: the source of the credentials failed: {_renewal()} ({kind}: {text})"
        )
    of_sign_in = ("SSOTokenLoadError", "UnauthorizedSSOTokenError", "TokenRetrievalError")
    if "Expired" in text or kind in of_sign_in:
        return f"cannot be read: the credentials have expired: {_renewal()} ({kind}: {text})"
    if region is None or kind == "NoRegionError":
        return "cannot be read: no region is known: set AWS_DEFAULT_REGION, or name the secret by its ARN"
    return (
        f"cannot be read: Secrets Manager does not answer in {region}: the subnets need an endpoint for it or a way"
        f" out ({kind}: {text})"
    )


def _renewal() -> str:
    """Return how to renew the credentials in this environment."""
    if is_container_endpoint(os.environ):
        return "submit again; if it fails again, check that the role exists and that SageMaker may assume it"
    return "sign in again"


def _pick(text: str, reference: SecretConfig) -> str:
    """Return a secret, or one value of a secret that is a JSON object."""
    value = text if reference.key is None else _value_of_key(text, reference.key)
    if "\0" in value or value.encode(errors="ignore").decode() != value:
        raise SecretError("holds a zero byte or an invalid character, which a variable cannot hold")
    return value


def _value_of_key(text: str, key: str) -> str:
    try:
        content = load_json(text)
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise SecretError(f"is no JSON object, so it has no key {key}: leave the key out")
    if key not in content:
        names = ", ".join(map(str, sorted(content))) or "none"
        raise SecretError(f"has no key {key}; it has {names}")
    value = content[key]
    if isinstance(value, dict | list) or value is None:
        raise SecretError(f"holds no text under the key {key}")
    return value if isinstance(value, str) else dump_json(value)


def main(arguments: list[str]) -> int:
    """Resolve the references on standard input, and print the values."""
    secrets = {
        name: SecretConfig(**reference) for name, reference in load_json(sys.stdin.read()).items()
    }
    answer = resolve(secrets, os.environ)
    values = {} if "--check" in arguments else dict(answer.values)
    print(dump_json({"values": values, "problems": answer.problems}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
