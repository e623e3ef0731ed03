"""The page docs/reference/permissions.md: recorded AWS calls, and the permissions of infra/.

    PYTHONPATH=tests python -m support.permissions --write           write the page's tables again
    PYTHONPATH=tests python -m support.permissions --policies FILE   store the policies that the tests have applied

A test compares the page with what this module generates.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from cloudtrain.catalog.permissions import conditions, rights
from cloudtrain.catalog.source import load, sources
from support.applied_policies import AppliedPolicies
from support.aws_calls import read_record
from support.iam_policy import Grant
from support.policy_comparison import Comparison, compare, plan_requests, reason_for
from support.required_actions import CONFIGURE, configure_actions

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "permissions.md"
_TABLE = re.compile(r"(<!-- (\w+): generated -->\n).*?(<!-- end -->)", re.DOTALL)


def without_rights() -> Mapping[str, str]:
    """Return the fields that need no right of their own, or none that is known, with the reason.

    A field stands for all fields below it that no right names.
    """
    entries = load("permissions")["without"].items()
    return {name: reason for names, reason in entries for name in names.split()}


def with_tables(text: str, applied: AppliedPolicies, comparison: Comparison) -> str:
    """Return the text of the page with new tables."""

    def table(found: re.Match[str]) -> str:
        others = {
            "figures": lambda: _figures(comparison),
            "fields": _fields,
            "conditions": _conditions,
            "without": _without,
            "sources": _sources,
            CONFIGURE: _configure,
        }
        made = (
            others[found[2]]()
            if found[2] in others
            else _policy_table(found[2], applied, comparison)
        )
        return f"{found[1]}{made}\n{found[3]}"

    return _TABLE.sub(table, text)


def _figures(comparison: Comparison) -> str:
    calls = {use.call.key for use in comparison.uses}
    rows = [
        ("calls recorded (operation, resource, caller)", len(calls)),
        (
            "actions on resources that they need",
            len({(use.request.action, use.request.resource) for use in comparison.uses}),
        ),
        ("needed and denied", len(comparison.denied)),
        ("allowed (statement, action, resource)", len(comparison.all_grants)),
        ("allowed and needed by no recorded call, with a reason", len(comparison.unused)),
        ("allowed and needed by no recorded call, without a reason", len(comparison.unexplained())),
    ]
    return _rows(("", "number"), [(name, str(number)) for name, number in rows])


def _configure() -> str:
    rows = [
        ("`sts:GetCallerIdentity`", "needs no permission: AWS allows it with any valid credentials")
    ]
    why = "used by `cloudtrain configure`, once, by the person who sets cloudtrain up"
    rows += [(f"`{action}`", why) for action in configure_actions(read_record().values())]
    return _rows(("action", "why"), rows)


def _fields() -> str:
    """Return the table of rights: who needs them, for which fields, on which kinds of resources."""
    rows = []
    for right in rights():
        asks = f"`{right.check}`" if right.check else f"not checked: {right.unchecked}"
        kinds = [f"`{kind}`" for kind in right.resources]
        rows.append(
            (
                _codes(right.fields),
                right.who,
                _codes(right.actions),
                ", ".join(kinds),
                _codes(right.keys) if right.name != "create" else "see below",
                f"`{right.variable}`" if right.variable else "always",
                asks,
                right.source,
            )
        )
    heads = (
        "field",
        "who",
        "actions",
        "on all kinds",
        "condition keys",
        "infra/",
        "check",
        "source",
    )
    return _rows(heads, rows)


def _conditions() -> str:
    rows = [
        (f"`{key}`", condition.unset or _codes(condition.fields))
        for key, condition in conditions().items()
    ]
    return _rows(("condition key", "field"), rows)


def _without() -> str:
    reasons: dict[str, list[str]] = {}
    for field, reason in without_rights().items():
        reasons.setdefault(reason, []).append(field)
    rows = [(_codes(fields), reason) for reason, fields in reasons.items()]
    return _rows(("field", "why"), rows)


def _sources() -> str:
    rows = [
        (key, f"[{source.name}]({source.url})", source.date)
        for key, source in sources("permissions").items()
    ]
    return _rows(("source", "document", "read"), rows)


def _codes(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _policy_table(policy: str, applied: AppliedPolicies, comparison: Comparison) -> str:
    rows = []
    for name, grant in comparison.all_grants:
        if name != policy:
            continue
        resource = _with_placeholders(grant.resource, applied)
        rows.append(
            (f"`{grant.action}`", f"`{resource}`", _callers(name, grant, comparison), grant.sid)
        )
    return _rows(("action", "resource", "who calls it", "statement"), rows)


def _callers(policy: str, grant: Grant, comparison: Comparison) -> str:
    callers: dict[str, set[str]] = {}
    for use in comparison.uses:
        if (policy, grant) in use.grants:
            callers.setdefault(use.call.who, set()).update(use.call.by)
    if not callers:
        reason = reason_for(policy, grant)
        return "no recorded call" if reason is None else f"*{reason.why}*"
    titles = {"service": "SageMaker"}
    return "; ".join(
        f"{titles.get(who, who)}: {', '.join(sorted(parts))}"
        for who, parts in sorted(callers.items())
    )


def _with_placeholders(resource: str, applied: AppliedPolicies) -> str:
    outputs = applied.outputs
    own: dict[str, str] = {
        f"{outputs['bucket']}/{outputs['prefix']}": "{bucket}/{prefix}",
        outputs["bucket"]: "{bucket}",
        outputs["kms_key"]: "{key}",
        outputs["role"]: "{role}",
        **dict.fromkeys(outputs["subnets"], "{subnet}"),
        **dict.fromkeys(outputs["security_groups"], "{group}"),
        applied.names["data-key"]: "{data-key}",
        applied.names["data"]: "{data}",
        applied.names["data-bucket"]: "{data-bucket}",
        applied.names["secret"]: "{secret}",
        f"job-queue/{applied.names['queue']}": "job-queue/{queue}",
        applied.names["account"]: "{account}",
        applied.names["region"]: "{region}",
    }
    for value, name in own.items():
        resource = resource.replace(value, name)
    return resource


def _rows(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    unique = list(dict.fromkeys(rows))
    return "\n".join(
        f"| {' | '.join(line)} |" for line in (heads, tuple("---" for _ in heads), *unique)
    )


def main(arguments: list[str]) -> int:
    """Write the page, or store the policies; return the exit code."""
    match arguments:
        case ["--write"]:
            applied = AppliedPolicies.read()
            comparison = compare(applied, plan_requests(applied))
            PAGE.write_text(
                with_tables(PAGE.read_text(encoding="utf-8"), applied, comparison), encoding="utf-8"
            )
            return 0
        case ["--policies", file]:
            AppliedPolicies.from_terraform(
                json.loads(Path(file).read_text(encoding="utf-8"))["module"]
            ).write()
            return 0
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
