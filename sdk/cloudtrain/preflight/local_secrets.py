"""Whether the secrets of a local run can be read, asked before anything is started."""

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
    """Ask for the secrets that a run on this machine will ask for; their values do not come here.

    Args:
        secrets: Where the values of a run's variables lie.
        environ: The environment: what it sets is not asked for.

    Raises:
        UserError: one of them cannot be had.
    """
    wanted = {name: dataclasses.asdict(reference) for name, reference in secrets.items() if name not in environ}
    if not wanted:
        return
    # -P: what lies in the working folder must not be imported.
    command = [sys.executable, "-P", "-m", "cloudtrain_runtime.launcher.secrets", "--check"]
    done = subprocess.run(
        command, input=dump_json(wanted), capture_output=True, encoding="utf-8", check=False, env=dict(environ)
    )
    problems = _problems(done)
    if problems:
        hint = f"set {' and '.join(wanted)} in this shell to run without AWS, or mend what is said above"
        raise UserError("\n".join(problems), hint)


def _problems(done: subprocess.CompletedProcess[str]) -> list[str]:
    try:
        return [str(problem) for problem in json.loads(done.stdout.splitlines()[-1])["problems"]]
    except (ValueError, LookupError, TypeError):
        return [f"the secrets could not be asked for:\n{done.stderr[-2000:].strip()}"]
