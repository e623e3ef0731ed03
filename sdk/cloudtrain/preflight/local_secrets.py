"""Check of the secrets of a local run."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Mapping

from cloudtrain.errors import UserError
from cloudtrain_runtime.contract import SecretConfig
from cloudtrain_runtime.contract.strict_json import dump_json


def check_local_secrets(secrets: Mapping[str, SecretConfig], environ: Mapping[str, str]) -> None:
    """Check that a run on this machine can read its secrets. Their values stay in a child process.

    Args:
        secrets: Secrets by environment variable.
        environ: The environment; variables that it sets need no secret.

    Raises:
        UserError: A secret cannot be read.
    """
    wanted = {name: dataclasses.asdict(reference) for name, reference in secrets.items() if name not in environ}
    if not wanted:
        return
    # -P: Python must not import modules from the working directory.
    command = [sys.executable, "-P", "-m", "cloudtrain_runtime.launcher.secrets", "--check"]
    done = subprocess.run(
        command, input=dump_json(wanted), capture_output=True, encoding="utf-8", check=False, env=dict(environ)
    )
    problems = _problems(done)
    if problems:
        hint = f"set {' and '.join(wanted)} in this shell to run without AWS, or fix the problems above"
        raise UserError("\n".join(problems), hint)


def _problems(done: subprocess.CompletedProcess[str]) -> list[str]:
    try:
        return [str(problem) for problem in json.loads(done.stdout.splitlines()[-1])["problems"]]
    except (ValueError, LookupError, TypeError):
        return [f"the secrets could not be checked:\n{done.stderr[-2000:].strip()}"]
