"""Why much of the paid time of a run was not training, and what to change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from cloudtrain.runs.ledger import Kind, Ledger, StartPart
from cloudtrain.support.backend_facts import facts_of
from cloudtrain.support.units import format_duration, format_usd

GOOD_RATIO = 0.9
"""From this effective training time ratio on there is no advice."""

_LEAST_SECONDS = 60.0
"""Shorter times are not worth a change."""

_LONG_START = 0.1
_LONG_STALL = 0.05
_LONG_IDLE = 0.05


def advise(ledger: Ledger, facts: Mapping[str, str]) -> tuple[str, ...]:
    """Return what to change after a run whose effective training time ratio is low, a sentence or two per cause.

    Args:
        ledger: The ledger of a run; one in progress gets no advice.
        facts: The known values of its job by field of job.yaml.
    """
    if not ledger.is_complete or ledger.ratio is None or ledger.ratio >= GOOD_RATIO:
        return ()
    causes = (_start(ledger, facts), _saves(ledger, facts), _idle(ledger, facts))
    return tuple(text for each in causes for text in each)


def _is_long(ledger: Ledger, share: float, *kinds: Kind) -> bool:
    seconds = sum(ledger.entry(kind).seconds for kind in kinds)
    return seconds >= _LEAST_SECONDS and ledger.share(*kinds) >= share


def _took(ledger: Ledger, *kinds: Kind) -> str:
    """Return what kinds took: `12m of 1h (20%, 3.40 USD)`."""
    entries = [ledger.entry(kind) for kind in kinds]
    seconds = sum(each.seconds for each in entries)
    usd = sum(each.usd or 0.0 for each in entries)
    money = f", {format_usd(usd)}" if usd else ""
    total = format_duration(ledger.seconds)
    return f"{format_duration(seconds)} of {total} ({ledger.share(*kinds):.0%}{money})"


def _start(ledger: Ledger, facts: Mapping[str, str]) -> Iterator[str]:
    if not _is_long(ledger, _LONG_START, Kind.START, Kind.RESTART):
        return
    name = "the start and the restarts" if ledger.interruptions else "the start"
    longest = max(ledger.start_parts.items(), key=lambda part: part[1])
    part, seconds = longest
    yield (
        f"{name} took {_took(ledger, Kind.START, Kind.RESTART)}, of it {format_duration(seconds)} for {part}: "
        f"{_fix_of_start(part, ledger, facts)}"
    )


def _fix_of_start(part: StartPart, ledger: Ledger, facts: Mapping[str, str]) -> str:
    if part is StartPart.DOWNLOAD:
        return "mode: FastFile in the data channel reads files when they are opened"
    if part is StartPart.IMAGE:
        return "cluster.keep_alive keeps instances and image for the next run, or use a smaller cluster.image"
    if part is StartPart.FIRST_STEP:
        return "keep what is compiled and prepared for it in a cache that the next start finds"
    if _is_in_account(ledger) and facts.get("code.requirements"):
        return (
            "put the packages of code.requirements, which each start installs, into cluster.image"
        )
    return "import less before the training, and read prepared data from a cache"


def _is_in_account(ledger: Ledger) -> bool:
    """Whether the run is one of an account, whose containers install the job's packages."""
    return facts_of(ledger.run.partition(":")[0]).uses_account


def _saves(ledger: Ledger, facts: Mapping[str, str]) -> Iterator[str]:
    """Yield what another `checkpoint.every` had saved. A program without it saves by code of its own."""
    if not _is_long(ledger, _LONG_STALL, Kind.CHECKPOINT, Kind.REPEATED):
        return
    saves = ledger.saves
    text = f"saves and lost work took {_took(ledger, Kind.CHECKPOINT, Kind.REPEATED)}"
    field = (
        "checkpoint.every"
        if "code.task" in facts
        else "the interval between the saves of the program"
    )
    if saves.interval is None:
        yield f"{text}: a shorter {field} loses less"
        return
    if saves.best is None:
        longer = ledger.entry(Kind.CHECKPOINT).seconds > ledger.entry(Kind.REPEATED).seconds
        effect = "longer {} stops the training less often" if longer else "shorter {} loses less"
        yield f"{text}: a {effect.format(field)}"
        return
    usual = format_duration(max(1.0, saves.interval.seconds))
    best = format_duration(max(1.0, saves.best.seconds))
    gained = saves.interval.lost_seconds - saves.best.lost_seconds
    money = ""
    if saves.interval.usd and saves.best.usd is not None:
        money = f" and {format_usd(saves.interval.usd - saves.best.usd)}"
    yield (
        f"{text}: a save per {best} in place of {usual} ({field}) saves about {format_duration(gained)}{money}, "
        f"with {ledger.interruptions} interruptions as in this run"
    )


def _idle(ledger: Ledger, facts: Mapping[str, str]) -> Iterator[str]:
    if not _is_long(ledger, _LONG_IDLE, Kind.IDLE):
        return
    text = f"nothing was trained for {_took(ledger, Kind.IDLE)}"
    limit = facts.get("limits.hang")
    if ledger.hung_seconds * 2 > ledger.entry(Kind.IDLE).seconds:
        now = f" (now {limit})" if limit else ""
        yield f"{text}, mostly in a hang: a shorter limits.hang{now} ends it earlier"
        return
    yield (
        f"{text} after the last step: close trackers and join threads at the end of the program, and evaluate in a run of "
        "its own (cloudtrain evaluate)"
    )
