"""What a ledger says in words. Commands, the dashboard and reports call it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cloudtrain.runs.ledger import PAID, Attempt, Entry, Interval, Kind, Ledger
from cloudtrain.runs.ledger_advice import advise
from cloudtrain.support.backend_facts import facts_of
from cloudtrain.support.notebook.summary import Row, count
from cloudtrain.support.units import format_duration, format_usd

LETTERS = {
    Kind.START: "s",
    Kind.TRAINING: "T",
    Kind.EVALUATION: "e",
    Kind.CHECKPOINT: "c",
    Kind.REPEATED: "x",
    Kind.RESTART: "r",
    Kind.IDLE: "i",
    Kind.UPLOAD: "u",
}
"""Letter of each kind in a bar of text."""

_LEAST_SHARE = 0.01
_SHOWN = 3


def describe_share(share: float) -> str:
    """Return a share in percent: `72%`; `<1%` for one that rounds to nothing."""
    if 0 < share < _LEAST_SHARE / 2:
        return "<1%"
    return f"{share:.0%}"


def describe_seconds(seconds: float) -> str:
    """Return seconds as people write them; those below ten with digits after the point."""
    if 0 < seconds < 0.095:  # noqa: PLR2004 (two digits)
        return f"{seconds:.2f}s"
    if 0 < seconds < 9.95:  # noqa: PLR2004 (two digits)
        return f"{seconds:.1f}s"
    return format_duration(seconds)


def headline(ledger: Ledger) -> str:
    """Return the effective training time ratio in a sentence: `72% of 1h12m was training that was kept`."""
    if ledger.ratio is None:
        return "nothing is paid so far"
    return f"{describe_share(ledger.ratio)} of {describe_seconds(ledger.seconds)} was training that was kept"


def status_text(ledger: Ledger) -> str:
    """Return where the time of a run went, for its status: the ratio, and the largest other kinds.

    Empty for a run in progress that has lost nothing.
    """
    has_lost = ledger.entry(Kind.REPEATED).seconds or ledger.interruptions
    if ledger.ratio is None or not (ledger.is_complete or has_lost):
        return ""
    others = [each for each in _paid(ledger) if each.kind is not Kind.TRAINING]
    largest = sorted(others, key=lambda each: -each.seconds)[:_SHOWN]
    shown = [Kind.TRAINING, *(each.kind for each in largest)]
    return ", ".join(
        f"{kind} {describe_share(ledger.share(kind))}"
        for kind in shown
        if kind is Kind.TRAINING or ledger.share(kind) >= _LEAST_SHARE
    )


def entry_text(ledger: Ledger, entry: Entry) -> str:
    """Return the sum of a kind: `4m10s, 6%, 0.50 USD`; without money where nothing is billed."""
    parts = [describe_seconds(entry.seconds)]
    if entry.kind is Kind.WAITING:
        return f"{parts[0]}, not paid"
    parts.append(describe_share(ledger.share(entry.kind)))
    if ledger.cost_usd:
        parts.append(format_usd(entry.usd or 0.0))
    return ", ".join(parts)


def attempt_text(attempt: Attempt) -> str:
    """Return the spans of an attempt in their order: `start 4m10s, training 1h2m`."""
    return ", ".join(f"{span.kind} {describe_seconds(span.seconds)}" for span in attempt.spans)


def interval_rows(ledger: Ledger) -> list[Row]:
    """Return what the saves took, and where the run was interrupted what other intervals would have cost."""
    saves = ledger.saves
    if saves.interval is None:
        return []
    share = describe_share(ledger.share(Kind.CHECKPOINT))
    text = (
        f"{count(saves.count, 'checkpoint')}, one per {describe_seconds(saves.interval.seconds)} of work; "
        f"each stops the training for {saves.stall_seconds:.2f}s ({share})"
    )
    rows = [("saves", text)]
    if saves.best is None:
        return rows
    known = [saves.interval, *saves.others]
    texts = [_describe_interval(each) for each in sorted(known, key=lambda each: each.seconds)]
    rows.append(("interval", f"saves and repeated work by interval: {'; '.join(texts)}"))
    rows.append(("best interval", f"{_describe_interval(saves.best)} (Young and Daly)"))
    return rows


def _describe_interval(found: Interval) -> str:
    money = f", {format_usd(found.usd)}" if found.usd else ""
    return f"{describe_seconds(found.seconds)} loses {describe_seconds(found.lost_seconds)}{money}"


def ledger_rows(ledger: Ledger, advice: Sequence[str]) -> list[Row]:
    """Return a ledger as names and values."""
    rows: list[Row] = [("run", ledger.run), ("ratio", headline(ledger))]
    if ledger.cost_usd:
        is_simulated = facts_of(ledger.run.partition(":")[0]).is_simulated
        rows.append(("would cost" if is_simulated else "cost", _cost(ledger)))
    rows += [(str(each.kind), entry_text(ledger, each)) for each in ledger.entries if each.seconds]
    rows += [
        (f"attempt {each.number}", attempt_text(each)) for each in ledger.attempts if each.spans
    ]
    rows += interval_rows(ledger)
    return [*rows, *(("advice", text) for text in advice)]


def _cost(ledger: Ledger) -> str:
    text = format_usd(ledger.cost_usd or 0.0)
    if 0 < ledger.billed_seconds < round(ledger.seconds):
        return f"{text}: AWS bills {format_duration(ledger.billed_seconds)} of the time on spot instances"
    return text


def _paid(ledger: Ledger) -> list[Entry]:
    return [ledger.entry(kind) for kind in PAID]


def ledger_document(ledger: Ledger, facts: Mapping[str, str]) -> dict[str, Any]:
    """Return what the page of a run shows of its ledger."""
    return {
        **ledger_json(ledger, advise(ledger, facts)),
        "headline": headline(ledger),
        "texts": {str(each.kind): entry_text(ledger, each) for each in ledger.entries},
        "rows": [list(row) for row in interval_rows(ledger)],
        "bars": [_bar(each) for each in ledger.attempts if each.paid],
    }


def _bar(attempt: Attempt) -> dict[str, Any]:
    return {
        "name": f"attempt {attempt.number}",
        "seconds": attempt.paid_seconds,
        "text": bar_text(attempt),
        "parts": [
            {
                "kind": span.kind,
                "letter": LETTERS[span.kind],
                "seconds": span.seconds,
                "text": f"{span.kind} {describe_seconds(span.seconds)}",
            }
            for span in attempt.paid
        ],
    }


def bar_text(attempt: Attempt) -> str:
    """Return what is beside the bar of an attempt: `40m after 2h of waiting`."""
    waited = sum(span.seconds for span in attempt.spans if span.kind is Kind.WAITING)
    text = describe_seconds(attempt.paid_seconds)
    return f"{text} after {describe_seconds(waited)} of waiting" if waited else text


def ledger_json(ledger: Ledger, advice: Sequence[str]) -> dict[str, Any]:
    """Return the object that `costs RUN --json` prints."""
    return {**ledger.to_json(), "advice": list(advice)}
