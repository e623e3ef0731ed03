"""Durations, sizes and money as people write them: `10m`, `1h30m`, `200GB`, `500 USD`, `500 steps`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta

from cloudtrain_runtime.contract import durations
from cloudtrain_runtime.contract.lazy_pattern import lazy_pattern

format_duration = durations.format_duration
"""See `cloudtrain_runtime.contract.durations`."""

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_BYTES = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_SHOWN = 40
# No duration, size or amount of money needs more digits.
_NUMBER = r"(\d{1,9}(?:\.\d{1,9})?)"
_DURATION = lazy_pattern(rf"(?:{_NUMBER}\s*[smhd]\s*){{1,4}}")
_DURATION_PART = lazy_pattern(rf"{_NUMBER}\s*([smhd])")
_SIZE = lazy_pattern(rf"{_NUMBER}\s*([KMGT]i?B|B)")
_STEPS = lazy_pattern(r"(\d{1,9})\s*steps?")
_MONEY = lazy_pattern(rf"{_NUMBER}\s*USD|USD\s*{_NUMBER}")


def parse_duration(value: object) -> int:
    """Return the seconds of a duration such as `90s`, `10m`, `1h30m` or `2d`.

    Raises:
        ValueError: not a duration; a bare number has no unit.
    """
    if isinstance(value, timedelta):
        if value.total_seconds() <= 0:
            raise ValueError(
                f"expected a duration of more than zero, got {value}; such as timedelta(hours=1)"
            )
        return math.ceil(value.total_seconds())
    text = str(value).strip()
    if isinstance(value, bool) or not _DURATION.fullmatch(text):
        raise ValueError(
            f"expected a duration with a unit such as 90s, 10m, 36h or 2d, got {_shown(value, 'm')}"
        )
    return round(
        sum(float(number) * _SECONDS[unit] for number, unit in _DURATION_PART.findall(text))
    )


def parse_size(value: object) -> int:
    """Return the bytes of a size such as `200GB` or `1.5TiB`.

    Raises:
        ValueError: not a size.
    """
    match = _SIZE.fullmatch(str(value).strip())
    if match is None:
        raise ValueError(
            f"expected a size with a unit such as 200GB or 1.5TB, got {_shown(value, 'GB')}"
        )
    return round(float(match[1]) * _BYTES[match[2]])


def parse_money(value: object) -> float:
    """Return the US dollars of an amount such as `500 USD`.

    Raises:
        ValueError: not an amount of US dollars.
    """
    match = _MONEY.fullmatch(str(value).strip())
    if match is None:
        raise ValueError(f"expected an amount such as 500 USD, got {_shown(value, ' USD')}")
    return float(match[1] or match[2])


def parse_moment(value: str, now: datetime, *, is_end: bool = False) -> datetime:
    """Return the moment written as `2d` (so long ago), `2026-11-01` or `2026-11-01T10:15`, in UTC.

    Args:
        value: The text. A time zone may follow (`+01:00`); without one it is UTC, as in run ids.
        now: The present time, with a time zone.
        is_end: A day alone means its end instead of its beginning, so that the day counts.

    Raises:
        ValueError: neither a duration nor a date.
    """
    text = value.strip()
    try:
        return now - timedelta(seconds=parse_duration(text))
    except (ValueError, OverflowError):
        pass
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(
            f"expected a duration such as 2d or a date such as 2026-11-01, got {value!r}"
        ) from None
    if is_end and moment.time() == time() and len(text) <= len("2026-11-01"):
        moment += timedelta(days=1)
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


_WORDS = lazy_pattern(r"(\d{1,9}(?:[.,]\d{1,9})*)\s*([A-Za-z]*)")
_LETTERS = {
    "s": "s",
    "sec": "s",
    "m": "m",
    "min": "m",
    "h": "h",
    "hr": "h",
    "hour": "h",
    "d": "d",
    "day": "d",
}


_THOUSANDS = lazy_pattern(r"[-+]?[1-9]\d{0,2}(?:,\d{3})+(?:\.\d*)?")
_DECIMAL_COMMA = lazy_pattern(r"[-+]?\d+,\d+(?:[eE][-+]?\d+)?")


def number_with_commas(text: str) -> str:
    """Return the number that a text with commas means: `1000` for `1,000`, `0.001` for `0,001`.

    An empty string for a text without commas, and where it is not one number.
    """
    if _THOUSANDS.fullmatch(text):
        return text.replace(",", "")
    if _DECIMAL_COMMA.fullmatch(text):
        return text.replace(",", ".")
    return ""


def _suggest(text: str, unit: str) -> str:
    """Return the value that a person probably meant, in its correct form, or an empty string."""
    found = _WORDS.fullmatch(text.replace("$", "").strip())
    if found is None:
        return ""
    number = number_with_commas(found[1]) or found[1]
    word = found[2].lower()
    if "," in number:
        return ""
    if unit == "USD":
        return f"{number} USD" if word in ("", "usd", "dollar", "dollars") else ""
    if unit == "GB":
        size = word.rstrip("b").upper()
        return f"{number}{size or 'G'}B" if size in ("", "K", "M", "G", "T") else ""
    return _suggest_count(number, word, unit)


def _suggest_count(number: str, word: str, unit: str) -> str:
    """Return the duration or the number of steps that a number and a word mean; `unit` is for a number alone."""
    if unit == "steps" and word in ("", "step", "steps"):
        return f"{number} steps"
    letter = _LETTERS.get(word) or _LETTERS.get(
        word.removesuffix("s").removesuffix("ute").removesuffix("ond")
    )
    if letter:
        return f"{number}{letter}"
    if unit == "steps" or word:
        return ""
    return f"{number}{unit}"


def _suggest_duration(text: str, unit: str) -> str:
    """Return the duration that a clock, an ISO 8601 duration or a number of seconds means; else an empty string."""
    if (clock := _CLOCK.fullmatch(text)) is not None:
        days, hours, minutes, seconds = (int(each or 0) for each in clock.groups())
        return _in_parts(d=days, h=hours, m=minutes, s=seconds)
    if (pair := _PAIR.fullmatch(text)) is not None:
        # Hours and minutes for people, minutes and seconds for Slurm.
        first, second = map(int, pair.groups())
        both = _in_parts(h=first, m=second), _in_parts(m=first, s=second)
        return " or ".join(filter(None, both))
    if (mixed := _HOURS_AND_NUMBER.fullmatch(text)) is not None:
        return f"{mixed[1]}h{mixed[2]}m"
    iso = _ISO.fullmatch(text)
    if iso is not None and _DURATION.fullmatch(iso_text := "".join(iso.groups("")).lower()):
        return iso_text
    if unit == "m" and _COUNT.fullmatch(text) and int(text) >= _LIKELY_SECONDS:
        # Arguments of SageMaker count seconds, and 7200m would be five days.
        return f"{text}s ({format_duration(int(text))}) or {text}m"
    return ""


_CLOCK = lazy_pattern(r"(?:(\d{1,3})-)?(\d{1,3}):(\d\d):(\d\d)")
_PAIR = lazy_pattern(r"(\d{1,3}):(\d\d)")
_HOURS_AND_NUMBER = lazy_pattern(r"(?i)(\d{1,3})h(\d{1,2})")
_ISO = lazy_pattern(r"P(\d+D)?(?:T(\d+H)?(\d+M)?(\d+S)?)?")
_COUNT = lazy_pattern(r"[0-9]{1,9}")
_LIKELY_SECONDS = 300


def _in_parts(**counts: int) -> str:
    return "".join(f"{count}{unit}" for unit, count in counts.items() if count)


@dataclass(frozen=True)
class Cadence:
    """How often something happens: after `seconds` or after `steps`; exactly one is set."""

    seconds: int | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        given = [count for count in (self.seconds, self.steps) if count is not None]
        if len(given) != 1 or given[0] <= 0:
            raise ValueError("give a positive number of either seconds or steps")

    def __str__(self) -> str:
        if self.seconds is None:
            return f"{self.steps} steps"
        return format_duration(self.seconds)


def parse_cadence(value: object) -> Cadence:
    """Return the cadence written as `10m` or `500 steps`.

    Raises:
        ValueError: neither a duration nor a number of steps, or zero.
    """
    if isinstance(value, Cadence):
        return value
    match = _STEPS.fullmatch(str(value).strip())
    try:
        count = int(match[1]) if match is not None else parse_duration(value)
    except ValueError:
        shown = _shown(value, " steps")
        raise ValueError(
            f"expected a duration such as 10m or a count such as 500 steps, got {shown}"
        ) from None
    if count <= 0:
        raise ValueError(f"must be more than zero, got {value}; such as 10m or 500 steps")
    return Cadence(steps=count) if match is not None else Cadence(seconds=count)


def _shown(value: object, unit: str) -> str:
    text = str(value).strip()
    shown = repr(value) if isinstance(value, str) else text
    if len(shown) >= _SHOWN:
        shown = f"{shown[:_SHOWN]}..."
    near = ""
    # The other units are sizes and amounts of money.
    if unit in ("m", " steps"):
        near = _suggest_duration(text, unit)
    near = near or _suggest(text, unit.strip())
    if near:
        return f"{shown}; did you mean {near}?"
    return f"{shown}; write it such as 10{unit}"


def format_usd(usd: float) -> str:
    """Return US dollars as people write them: `1,234.50 USD`."""
    return f"{usd:,.2f} USD"


def format_size(count: float) -> str:
    """Return bytes as people write them: `1.8 MB`."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:  # noqa: PLR2004 (decimal units)
            digits = 0 if unit == "B" else 1
            return f"{count:.{digits}f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


_AGES = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def format_age(seconds: float) -> str:
    """Return how long ago something was, as people write it: `5s ago`, `2m ago`, `3h ago`, `5d ago`."""
    for unit, size in _AGES.items():
        if seconds >= size:
            return f"{int(seconds // size)}{unit} ago"
    return "now"


_DIGITS = 4
_THOUSAND = 1000
_LONGEST = 1e9


def format_plain_number(value: float) -> str:
    """Return a number for scripts, logs and files: six significant digits without separators, such as `2696.12`."""
    return f"{value:.6g}"


def format_number(value: float) -> str:
    """Return a number with four significant digits: `0.06824`, `1.234e-05`, and `2,696` from thousands on."""
    rounded = float(f"{value:.{_DIGITS}g}")
    if _THOUSAND <= abs(rounded) < _LONGEST:
        return f"{value:,.0f}"
    return f"{value:.{_DIGITS}g}"
