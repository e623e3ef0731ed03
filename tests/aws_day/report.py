"""The result of a day: its verdicts, its redacted file, and its table on the terminal."""

from __future__ import annotations

import getpass
import json
import shutil
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from aws_day.account import Account
from aws_day.assumptions import ASSUMPTIONS, BY_KEY
from aws_day.page import AWS, DIFFERS, HOLDS, NO_ANSWER, SANDBOX, SCHEMA, VERDICTS
from aws_day.redaction import Redactor
from aws_day.times import Times
from cloudtrain import Settings

RESULT = "aws-day.json"
_WIDTH = 100
"""Width of the table where there is no terminal."""


def judge(
    answers: Mapping[str, tuple[Any, str]], reasons: Mapping[str, tuple[str, str]], times: Times
) -> list[dict[str, Any]]:
    """Return the verdict about each assumption.

    Args:
        answers: Observation and note by the assumption's key.
        reasons: Verdict and reason by the trial's name, of trials that have not answered everything.
        times: The times of the day.
    """
    found = []
    for each in ASSUMPTIONS:
        entry: dict[str, Any] = {
            "key": each.key,
            "trial": each.trial,
            "statement": each.statement.format(**times.to_json()),
            "expected": each.expected_with(times),
        }
        if each.key not in answers:
            verdict, reason = reasons.get(each.trial, (NO_ANSWER, "the trial has not answered it"))
            found.append({**entry, "verdict": verdict, "reason": reason})
            continue
        observed, note = answers[each.key]
        entry |= {"verdict": _verdict(each.key, observed, times), "observed": observed}
        found.append({**entry, **({"note": note} if note else {})})
    return found


def _verdict(key: str, observed: Any, times: Times) -> str:
    try:
        return HOLDS if BY_KEY[key].holds(observed, times) else DIFFERS
    except (TypeError, ValueError, KeyError, IndexError):
        # An observation of another form than every expected one.
        return DIFFERS


def document(
    *,
    account: Account,
    version: str,
    times: Times,
    answers: Sequence[Mapping[str, Any]],
    trials: Sequence[Mapping[str, Any]],
    ledger: Mapping[str, float],
    cleanup: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the content of a result, not yet redacted."""
    return {
        "schema": SCHEMA,
        "service": SANDBOX if account.is_simulated else AWS,
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "region": account.settings.region,
        "cloudtrain": version,
        "times": times.to_json(),
        "costs": dict(ledger),
        "answers": list(answers),
        "trials": list(trials),
        "cleanup": dict(cleanup),
    }


def redactor_of(settings: Settings, caller: Mapping[str, str]) -> Redactor:
    """Return the redactor of an account and of this machine."""
    role = settings.role or ""
    arn = caller.get("Arn", "")
    user = ""
    with suppress(OSError, KeyError):
        user = getpass.getuser()
    known = {
        "localhost": "",
        socket.gethostname(): "<machine>",
        socket.getfqdn(): "<machine>",
        user: "<user>",
        str(Path.home()): "<home>",
        arn.rpartition("/")[2]: "<caller>",
        caller.get("UserId", ""): "<caller>",
        caller.get("Account", ""): "<account>",
        settings.account or "": "<account>",
        role.rpartition("/")[2]: "<role>",
        settings.bucket or "": "<bucket>",
        settings.kms_key or "": "<kms key>",
        role: "<role>",
        arn: "<caller>",
    }
    # The day's own folder is below the prefix of the settings.
    prefix = settings.prefix.partition("/aws-day/")[0]
    known |= {prefix: "<prefix>"} if prefix != Settings.prefix else {}
    known |= dict.fromkeys((*settings.subnets, *settings.security_groups), "<network id>")
    return Redactor(known)


def write(path: Path, content: Mapping[str, Any], redactor: Redactor) -> dict[str, Any]:
    """Write a result without the names of account and machine; return what was written.

    Raises:
        ValueError: Such a name is still in it; nothing is written.
    """
    plain = json.loads(json.dumps(content, default=str))
    redacted: dict[str, Any] = redactor.document(plain)
    text = json.dumps(redacted, indent=1) + "\n"
    left = redactor.found_in(redacted)
    if left:
        raise ValueError(f"the result still contains {', '.join(sorted(set(left)))}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return redacted


def table(result: Mapping[str, Any]) -> str:
    """Return the table of the terminal: one assumption per line, the differences at the end in full."""
    answers = result["answers"]
    width = max(len(each["key"]) for each in answers)
    columns = shutil.get_terminal_size((_WIDTH, 24)).columns
    lines = []
    for each in answers:
        shown = each.get("reason") or json.dumps(each.get("observed"))
        line = f"{each['verdict']:9}  {each['key']:{width}}  {shown}"
        lines.append(line if len(line) <= columns else f"{line[: columns - 4]} ...")
    differing = [each for each in answers if each["verdict"] == DIFFERS]
    for each in differing:
        lines += [
            "",
            f"differs: {each['key']}: {each['statement']}",
            f"  expected  {each['expected']}",
            f"  observed  {json.dumps(each['observed'])}",
            *([f"  note      {each['note']}"] if "note" in each else []),
        ]
    failed = [each for each in result["trials"] if each["outcome"] == "failed"]
    if failed:
        lines.append("")
    lines += [f"failed: trial {each['name']}: {each['reason']}" for each in failed]
    verdicts = [each["verdict"] for each in answers]
    counts = [f"{each}: {verdicts.count(each)}" for each in VERDICTS if verdicts.count(each)]
    lines += ["", f"{len(answers)} assumptions; {', '.join(counts)}"]
    return "\n".join(lines)


def exit_code(result: Mapping[str, Any]) -> int:
    """Return 0 if nothing differs and no trial has failed, else 1."""
    has_difference = any(each["verdict"] in (DIFFERS, NO_ANSWER) for each in result["answers"])
    has_failure = any(each["outcome"] == "failed" for each in result["trials"])
    return 1 if has_difference or has_failure else 0
