from collections.abc import Callable
from datetime import timedelta

import pytest

from cloudtrain.support.units import (
    Cadence,
    format_duration,
    format_size,
    parse_cadence,
    parse_duration,
    parse_money,
    parse_size,
)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90),
        ("10m", 600),
        ("36h", 129_600),
        ("2d", 172_800),
        ("1h30m", 5400),
        ("1.5h", 5400),
        ("1 h 5 m", 3900),
    ],
)
def test_durations_are_read_as_people_write_them(text: str, seconds: int) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("value", ["10", 10, "", "m", "10 minutes", "-5m", True, None, "1e3s"])
def test_malformed_durations_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match="unit such as"):
        parse_duration(value)


def test_a_timedelta_is_a_duration() -> None:
    assert parse_duration(timedelta(minutes=2)) == 120


@pytest.mark.parametrize(
    ("text", "count"), [("200GB", 200 * 10**9), ("1.5 TB", 1.5e12), ("64GiB", 64 * 2**30)]
)
def test_sizes(text: str, count: float) -> None:
    assert parse_size(text) == count


@pytest.mark.parametrize("value", ["200", "200 gigabytes", "GB", 7, "200Gb"])
def test_malformed_sizes_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match="200GB"):
        parse_size(value)


def test_money() -> None:
    assert parse_money("500 USD") == 500
    assert parse_money("USD 1.5") == 1.5
    with pytest.raises(ValueError, match="500 USD"):
        parse_money("500 EUR")


def test_cadences() -> None:
    assert parse_cadence("500 steps") == Cadence(steps=500)
    assert parse_cadence("1 step") == Cadence(steps=1)
    assert parse_cadence("10m") == Cadence(seconds=600)
    for wrong in ("0 steps", "0m", "often", 500):
        with pytest.raises(ValueError, match=r"expected|more than zero"):
            parse_cadence(wrong)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59, "59s"), (60, "1m"), (5400, "1h30m"), (86_400, "1d"), (90_061, "1d1h")],
)
def test_durations_are_shown_as_people_write_them(seconds: int, text: str) -> None:
    assert format_duration(seconds) == text


def test_sizes_are_shown_as_people_write_them() -> None:
    assert [format_size(n) for n in (0, 999, 1000, 1_500_000, 2e12)] == [
        "0 B",
        "999 B",
        "1.0 KB",
        "1.5 MB",
        "2.0 TB",
    ]


@pytest.mark.parametrize(
    ("text", "parse", "meant"),
    [
        ("1,000 USD", parse_money, "USD"),
        ("$1,000", parse_money, "1000 USD"),
        ("0,5 USD", parse_money, "0.5 USD"),
        ("1,5h", parse_duration, "1.5h"),
        ("1,5TB", parse_size, "1.5TB"),
        ("1,000 steps", parse_cadence, "1000 steps"),
        ("1,00,5 USD", parse_money, "such as 10 USD"),
    ],
)
def test_a_comma_is_not_dropped_from_a_number(
    text: str, parse: Callable[[object], object], meant: str
) -> None:
    with pytest.raises(ValueError, match=r"expected") as caught:
        parse(text)
    assert meant in str(caught.value)


@pytest.mark.parametrize(
    ("text", "parse", "meant"),
    [
        ("12:30:00", parse_duration, "did you mean 12h30m?"),
        ("1-02:00:15", parse_duration, "did you mean 1d2h15s?"),
        ("2:00", parse_duration, "did you mean 2h or 2m?"),
        ("1:30", parse_duration, "did you mean 1h30m or 1m30s?"),
        ("0:30", parse_duration, "did you mean 30m or 30s?"),
        ("1h30", parse_duration, "did you mean 1h30m?"),
        ("PT2H30M", parse_duration, "did you mean 2h30m?"),
        ("P1DT2H", parse_duration, "did you mean 1d2h?"),
        (7200, parse_duration, "did you mean 7200s (2h) or 7200m?"),
        ("86400", parse_duration, "did you mean 86400s (1d) or 86400m?"),
        (30, parse_duration, "did you mean 30m?"),
        ("00:10:00", parse_cadence, "did you mean 10m?"),
        (7200, parse_cadence, "did you mean 7200 steps?"),
        ("00:00:00", parse_duration, "write it such as 10m"),
        ("PT", parse_duration, "write it such as 10m"),
        ("forever", parse_duration, "write it such as 10m"),
    ],
)
def test_a_duration_of_another_tool_is_translated(
    text: object, parse: Callable[[object], object], meant: str
) -> None:
    with pytest.raises(ValueError, match=r"expected") as caught:
        parse(text)
    assert str(caught.value).endswith(f"; {meant}")
