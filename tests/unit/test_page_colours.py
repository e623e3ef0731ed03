"""The colours of the pages: contrasts, and differences for readers who see no red, no green or no blue."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping

import pytest

from cloudtrain.features.dashboard.page import STATIC

SERIES = [f"--series-{number}" for number in range(8)]
SCALE = [f"--scale-{number}" for number in range(5)]
TEXTS = ("--ink", "--muted", "--accent", "--good", "--warn", "--bad")
GROUNDS = ("--panel", "--paper")
TEXT_CONTRAST, LINE_CONTRAST = 4.5, 3.0

LEAST_DIFFERENCE = 10.0
"""Smallest CIEDE2000 between two series. Readers notice 2.3; thin lines need several times that."""

LEAST_STEP = 6.0
"""Smallest difference in lightness (CIE L*) between neighbours of the scale."""

Colour = tuple[float, float, float]
Matrix = tuple[Colour, Colour, Colour]

# Machado, Oliveira, Fernandes 2009, severity 1.0, for linear RGB.
VISIONS: dict[str, Matrix] = {
    "usual": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}
TO_XYZ: Matrix = (
    (0.4124564, 0.3575761, 0.1804375),
    (0.2126729, 0.7151522, 0.0721750),
    (0.0193339, 0.1191920, 0.9503041),
)
WHITE = (0.95047, 1.0, 1.08883)


def read_themes() -> dict[str, dict[str, str]]:
    """Return the colours of each block of base.css that defines all of them."""
    text = (STATIC / "base.css").read_text(encoding="utf-8")
    blocks = re.findall(r"(:root[^{}]*)\{([^{}]*--series-0[^{}]*)\}", text)
    return {
        head.strip(): dict(re.findall(r"(--[a-z]+(?:-[a-z0-9]+)?): (#[0-9a-f]+);", body))
        for head, body in blocks
    }


THEMES = read_themes()
LIGHT, DARK = THEMES[":root"], THEMES[':root[data-theme="dark"]']


def linear(text: str) -> Colour:
    digits = text[1:] if len(text) == len("#rrggbb") else "".join(2 * each for each in text[1:])
    red, green, blue = (int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4))
    return _linear(red), _linear(green), _linear(blue)


def _linear(value: float) -> float:
    return value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4


def apply(matrix: Matrix, colour: Colour) -> Colour:
    red, green, blue = (
        sum(one * two for one, two in zip(row, colour, strict=True)) for row in matrix
    )
    return red, green, blue


def contrast(one: str, two: str) -> float:
    """Return the contrast of two colours by WCAG."""
    lower, higher = sorted(apply(TO_XYZ, linear(each))[1] for each in (one, two))
    return (higher + 0.05) / (lower + 0.05)


def lab(colour: Colour) -> Colour:
    clipped = (
        min(1.0, max(0.0, colour[0])),
        min(1.0, max(0.0, colour[1])),
        min(1.0, max(0.0, colour[2])),
    )
    x, y, z = (
        _lab(value / white) for value, white in zip(apply(TO_XYZ, clipped), WHITE, strict=True)
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def _lab(value: float) -> float:
    return math.cbrt(value) if value > 216 / 24389 else (24389 / 27 * value + 16) / 116


def difference(one: Colour, two: Colour) -> float:
    """Return the CIEDE2000 of two colours in CIE L*a*b*."""
    mean = (math.hypot(*one[1:]) + math.hypot(*two[1:])) / 2
    stretch = 1.5 - 0.5 * math.sqrt(mean**7 / (mean**7 + 25.0**7))
    chromas = [math.hypot(each[1] * stretch, each[2]) for each in (one, two)]
    hues = [math.degrees(math.atan2(each[2], each[1] * stretch)) % 360 for each in (one, two)]
    lightness, chroma = (one[0] + two[0]) / 2, sum(chromas) / 2
    turn = (hues[1] - hues[0] + 180) % 360 - 180
    hue = sum(hues) / 2 if abs(hues[0] - hues[1]) <= 180 else (sum(hues) + 360) / 2 % 360
    weight = (
        1
        - 0.17 * math.cos(math.radians(hue - 30))
        + 0.24 * math.cos(math.radians(2 * hue))
        + 0.32 * math.cos(math.radians(3 * hue + 6))
        - 0.20 * math.cos(math.radians(4 * hue - 63))
    )
    far = (lightness - 50) ** 2
    by_lightness = (two[0] - one[0]) / (1 + 0.015 * far / math.sqrt(20 + far))
    by_chroma = (chromas[1] - chromas[0]) / (1 + 0.045 * chroma)
    by_hue = 2 * math.sqrt(chromas[0] * chromas[1]) * math.sin(math.radians(turn) / 2)
    by_hue /= 1 + 0.015 * chroma * weight
    rotation = -math.sin(math.radians(60 * math.exp(-(((hue - 275) / 25) ** 2))))
    rotation *= 2 * math.sqrt(chroma**7 / (chroma**7 + 25.0**7))
    return math.sqrt(by_lightness**2 + by_chroma**2 + by_hue**2 + rotation * by_chroma * by_hue)


def seen(theme: Mapping[str, str], names: list[str], vision: str) -> list[Colour]:
    return [lab(apply(VISIONS[vision], linear(theme[name]))) for name in names]


def test_the_difference_is_that_of_the_standard() -> None:
    # Pairs 1 and 17 of Sharma, Wu and Dalal 2005.
    assert difference((50, 2.6772, -79.7751), (50, 0, -82.7485)) == pytest.approx(2.0425, abs=1e-4)
    assert difference((50, 2.5, 0), (73, 25, -18)) == pytest.approx(27.1492, abs=1e-4)


def test_the_dark_theme_is_the_same_chosen_or_preferred() -> None:
    assert [*THEMES] == [":root", ':root[data-theme="dark"]', ':root:not([data-theme="light"])']
    assert THEMES[':root:not([data-theme="light"])'] == DARK
    assert {*LIGHT} == {*DARK}


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_texts_can_be_read(theme: Mapping[str, str]) -> None:
    found = {(text, on): contrast(theme[text], theme[on]) for text in TEXTS for on in GROUNDS}
    found[("--on-accent", "--accent")] = contrast(theme["--on-accent"], theme["--accent"])
    for number, series in enumerate(SERIES):
        found[(f"--on-{number}", series)] = contrast(theme[f"--on-{number}"], theme[series])
    assert {pair: value for pair, value in found.items() if value < TEXT_CONTRAST} == {}


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_lines_differ_from_their_panel(theme: Mapping[str, str]) -> None:
    found = {name: contrast(theme[name], theme["--panel"]) for name in (*SERIES, *SCALE)}
    assert {name: value for name, value in found.items() if value < LINE_CONTRAST} == {}


@pytest.mark.parametrize("vision", VISIONS)
@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_series_are_told_apart(theme: Mapping[str, str], vision: str) -> None:
    pairs = itertools.combinations(zip(SERIES, seen(theme, SERIES, vision), strict=True), 2)
    found = {(one, two): difference(first, second) for (one, first), (two, second) in pairs}
    assert {pair: value for pair, value in found.items() if value < LEAST_DIFFERENCE} == {}


@pytest.mark.parametrize("vision", VISIONS)
@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_the_scale_has_an_order(theme: Mapping[str, str], vision: str) -> None:
    lightness = [each[0] for each in seen(theme, SCALE, vision)]
    sign = 1 if theme is DARK else -1
    steps = [sign * (two - one) for one, two in itertools.pairwise(lightness)]
    assert min(steps) >= LEAST_STEP
