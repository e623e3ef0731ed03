"""Checks of the job's secrets: they exist, and the role, or a run on this machine, may read them."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from cloudtrain.errors import UserError
from cloudtrain.preflight.base import CheckContext, UnansweredError, command, find, map_concurrently
from cloudtrain.preflight.rights import RequiredAccess, accesses
from cloudtrain.preflight.role import check_denials, simulate_policy
from cloudtrain.support.aws_names import parse_arn
from cloudtrain.support.checks import Check, failed
from cloudtrain_runtime.contract import SecretConfig
from cloudtrain_runtime.contract.strict_json import dump_json, load_json


def check_secrets(context: CheckContext) -> Iterator[Check]:
    """Check that each secret exists, and by simulation that the role may read it."""
    wanted: dict[tuple[str, str | None], tuple[str, SecretConfig]] = {}
    for name, reference in context.plan.config.secrets.items():
        wanted.setdefault((reference.secret, reference.stage), (name, reference))
    found = map_concurrently(lambda pair: _find(context, *pair), wanted.values())
    missing = [answer for answer in found if isinstance(answer, Check)]
    if missing:
        yield missing[0]
        return
    needs = list(
        dict.fromkeys(
            need for each in found if isinstance(each, dict) for need in _needs(context, each)
        )
    )
    count = len({secret for secret, _ in wanted})
    which = "the secret" if count == 1 else f"all {count} secrets"
    fine = f"the role may read {which}"
    yield check_denials(
        "secrets", fine, simulate_policy(context, context.role_arn, needs), context.role.name
    )


def _find(context: CheckContext, name: str, reference: SecretConfig) -> dict[str, Any] | Check:
    arn = parse_arn(reference.secret)
    if arn is not None and arn.region != context.region:
        raise UnansweredError(
            f"{reference.secret} is in {arn.region}; this check covers only {context.region}"
        )
    describe = context.client("secretsmanager").describe_secret
    found: dict[str, Any] | None = find(
        ("ResourceNotFoundException",), describe, SecretId=reference.secret
    )
    if found is None:
        make = command(
            *("aws", "secretsmanager", "create-secret", "--region", context.region),
            *("--name", reference.secret, "--secret-string", "file://FILE"),
        )
        return failed(
            "secrets", f"{name}: there is no secret {reference.secret} in {context.region}", make
        )
    stages = {
        stage for version in found.get("VersionIdsToStages", {}).values() for stage in version
    }
    if reference.stage is not None and reference.stage not in stages:
        existing = ", ".join(sorted(stages)) or "none"
        message = (
            f"{name}: the secret {reference.secret} has no version with the stage {reference.stage}"
        )
        return failed("secrets", message, f"use an existing stage: {existing}")
    if "DeletedDate" in found:
        message = f"{name}: the secret {reference.secret} is being deleted"
        restore = command(
            "aws", "secretsmanager", "restore-secret", "--secret-id", reference.secret
        )
        return failed("secrets", message, restore)
    return found


def _needs(context: CheckContext, found: Mapping[str, Any]) -> Iterator[RequiredAccess]:
    """Yield the access that a role needs to read a secret. A policy of the secret or of its key may grant it, too."""
    key = str(found.get("KmsKeyId") or "")
    is_named = key.startswith("arn:") and ":key/" in key
    values = {"secret": (str(found["ARN"]),), "secret_key": (key,) if is_named else ()}
    yield from accesses("secrets", values, context.role)


def check_local_secrets(secrets: Mapping[str, SecretConfig], environ: Mapping[str, str]) -> None:
    """Check that a run on this machine can read its secrets. Their values stay in a child process.

    Args:
        secrets: Secrets by environment variable.
        environ: The environment; variables that it sets need no secret.

    Raises:
        UserError: A secret cannot be read.
    """
    wanted = {
        name: dataclasses.asdict(reference)
        for name, reference in secrets.items()
        if name not in environ
    }
    if not wanted:
        return
    # -P: Python must not import modules from the working directory.
    program = [sys.executable, "-P", "-m", "cloudtrain_runtime.launcher.secrets", "--check"]
    done = subprocess.run(
        program,
        input=dump_json(wanted),
        capture_output=True,
        encoding="utf-8",
        check=False,
        env=dict(environ),
    )
    try:
        problems = [str(problem) for problem in load_json(done.stdout.splitlines()[-1])["problems"]]
    except (ValueError, LookupError, TypeError):
        problems = [f"the secrets could not be checked:\n{done.stderr[-2000:].strip()}"]
    if problems:
        hint = f"set {' and '.join(wanted)} in this shell to run without AWS, or fix the problems above"
        raise UserError("\n".join(problems), hint)
