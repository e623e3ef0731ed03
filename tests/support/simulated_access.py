"""What checks have asked IAM's policy simulator."""

from __future__ import annotations

from urllib.parse import parse_qs

from support.aws_frontend import Front, Request

_OPERATION = "SimulatePrincipalPolicy"


def asked(front: Front) -> dict[str, set[str]]:
    """Return the resources by action."""
    found: dict[str, set[str]] = {}
    for request in _simulations(front):
        for action in request.form("ActionNames"):
            found.setdefault(action, set()).update(request.form("ResourceArns"))
    return found


def context_keys(front: Front, action: str) -> dict[str, list[str]]:
    """Return the values by condition key of the last simulation of an action."""
    last = [each for each in _simulations(front) if action in each.form("ActionNames")][-1]
    return read_context(last)


def read_context(request: Request) -> dict[str, list[str]]:
    """Return the values by condition key of a simulation."""
    form = parse_qs(request.body.decode())
    names = {key: value[0] for key, value in form.items() if key.endswith(".ContextKeyName")}
    return {
        name: [
            form[each][0]
            for each in sorted(form)
            if each.startswith(key.replace("KeyName", "KeyValues"))
        ]
        for key, name in names.items()
    }


def _simulations(front: Front) -> list[Request]:
    return [each for each in front.requests if each.operation == _OPERATION]
