"""Hints in Python: errors name commands and options, and a caller of the Python API needs its calls and arguments."""

from __future__ import annotations

import re
from typing import Final

_COMMANDS: Final = {
    r"list --endpoints": "cloudtrain.list_endpoints()",
    r"list": "cloudtrain.list_runs()",
    r"checkpoints verify (\S+)": "cloudtrain.checkpoint_folder({0}).verify()",
    r"checkpoints (\S+)": "cloudtrain.checkpoint_folder({0}).list()",
    r"status (\S+)": "cloudtrain.status({0})",
    r"stop (\S+)": "cloudtrain.stop({0})",
    r"download (\S+) --what (\w+)": "cloudtrain.download({0}, what=[{1}])",
    r"download (\S+)": "cloudtrain.download({0})",
    r"deploy (\S+) --plan": "cloudtrain.deploy({0}, plan=True)",
    r"deploy (\S+) --engine (\w+)": "cloudtrain.deploy({0}, cloudtrain.serving.EndpointOptions(engine={1}))",
    r"undeploy (\S+) --sandbox": "cloudtrain.undeploy({0}, sandbox=True)",
    r"undeploy (\S+)": "cloudtrain.undeploy({0})",
    r"resume (\S+) --set (\S+?)(?=,?(?:\s|$))": "cloudtrain.resume({0}, [{1}])",
    r"resume (\S+)": "cloudtrain.resume({0})",
    r"submit --local (\S+) --set (\S+)": (
        "cloudtrain.submit(JobSpec.from_yaml({0}, [{1}]), local=True)"
    ),
    r"submit --local JOB": "cloudtrain.submit(job, local=True)",
    r"submit --local": "cloudtrain.submit(job, local=True)",
    r"submit --sandbox": "cloudtrain.submit(job, sandbox=True)",
    r"submit (\S+) --set (\S+)": "cloudtrain.submit(JobSpec.from_yaml({0}, [{1}]))",
    r"submit JOB": "cloudtrain.submit(job)",
    r"check JOB": "cloudtrain.check(job)",
}
"""Calls by the commands that do the same. Of those that fit, the first is taken."""

_OPTIONS: Final = {
    r"--checkpoint STEP": "checkpoint=STEP",
    r"--to DIR": "to=DIR",
    r"--what (\w+)(?= *$)": "what=[{0}]",
    r"--what": "what",
    r"--step last": 'step="last"',
    r"--force": "force=True",
    r"--local": "local=True",
    r"--new": "new=True",
    r"--plan": "plan=True",
    r"--sandbox": "sandbox=True",
    r"--skip-check": "skip_check=True",
}
"""Arguments by the options that a hint names without their command."""

_SEPARATORS: Final = r"(; |\n)"
_OTHER_COMMANDS: Final = r"\b(?:cloudtrain -|cloudtrain [a-z]|aws |pip |uv |python )"


def in_python(hint: str) -> str:
    """Return a hint for a caller of the Python API.

    A part of it stays as it is where it has a command that Python has no call for.
    """
    # Patterns are compiled here, on first use: every command imports this module.
    return "".join(_translate(part) for part in re.split(_SEPARATORS, hint))


def _translate(part: str) -> str:
    for command, call in _COMMANDS.items():
        part = _replace(part, rf"\bcloudtrain {command}(?![\w-])", call)
    if re.search(_OTHER_COMMANDS, part):
        return part
    for option, argument in _OPTIONS.items():
        part = _replace(part, rf"(?<!\S){option}(?![\w-])", argument)
    return part


def _replace(part: str, pattern: str, python: str) -> str:
    return re.sub(pattern, lambda found: python.format(*map(_literal, found.groups())), part)


def _literal(text: str) -> str:
    """Return text as a string in Python. A name in capitals, such as RUN, is a placeholder and stays."""
    return text if text.isupper() else f'"{text}"'
