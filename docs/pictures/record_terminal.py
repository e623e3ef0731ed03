"""Record a command on a terminal, and write the recording as an animated SVG.

    python docs/pictures/record_terminal.py

records the README's `demo.svg`. Another command and picture:

    python docs/pictures/record_terminal.py --out picture.svg -- cloudtrain list

The command runs on a pseudo-terminal with 80 columns and 24 rows. pyte interprets what it prints. The picture has no
script: CSS moves from one screen to the next at the recorded times, so it also plays as an image of a README. Pauses are
shortened. Readers whose system asks for reduced motion see the last screen.
"""

from __future__ import annotations

import argparse
import codecs
import fcntl
import html
import os
import pty
import select
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import pyte

REPOSITORY = Path(__file__).resolve().parents[2]
DEMO = "cloudtrain submit examples/digits/job.yaml --local --instances 2 --follow"
"""The command of `make demo`."""

COLUMNS, ROWS = 80, 24
FRAME_SECONDS = 0.1
"""Output within this time is one screen."""
LONGEST_PAUSE = 1.0
LAST_SCREEN_SECONDS = 8.0
KEY_SECONDS = 0.03
LIMIT_SECONDS = 300.0
LARGEST_BYTES = 300_000

CELL_WIDTH, CELL_HEIGHT, FONT_SIZE = 8.43, 19, 14
MARGIN, BAR = 16, 34
BACKGROUND, FOREGROUND = "#0f1720", "#d7dee8"
COLOURS = {
    "black": "#5b6877",
    "red": "#ff7b72",
    "green": "#56d364",
    "brown": "#e3b341",
    "yellow": "#e3b341",
    "blue": "#79c0ff",
    "magenta": "#d2a8ff",
    "cyan": "#56d4dd",
    "white": "#ffffff",
}
FONTS = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"


class Style(NamedTuple):
    """How a piece of text looks."""

    colour: str
    background: str
    bold: bool
    dim: bool
    italic: bool
    underline: bool


class Piece(NamedTuple):
    """A piece of a row: its first column, its text and its style."""

    column: int
    text: str
    style: Style


Row = tuple[Piece, ...]
Frame = tuple[Row, ...]


@dataclass(frozen=True)
class Chunk:
    """What a command printed at one time, in seconds since its start."""

    seconds: float
    text: str


@dataclass
class Picture:
    """The screens of a recording, and how long each is shown."""

    frames: list[Frame] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def show(self, frame: Frame, seconds: float) -> None:
        """Add a screen; one that equals the last is shown longer instead."""
        if self.frames and self.frames[-1] == frame:
            self.seconds[-1] = min(self.seconds[-1] + seconds, LONGEST_PAUSE)
            return
        self.frames.append(frame)
        self.seconds.append(min(seconds, LONGEST_PAUSE))


class Screen(pyte.Screen):
    """pyte's screen, which knows no dim text: it is kept as the blinking text that no command prints."""

    def select_graphic_rendition(self, *attributes: int, **options: Any) -> None:
        """Set the style of what follows."""
        super().select_graphic_rendition(*_with_dim_as_blink(attributes), **options)


def _with_dim_as_blink(attributes: Sequence[int]) -> list[int]:
    result: list[int] = []
    rest = list(attributes)
    while rest:
        code = rest.pop(0)
        if (
            code in {38, 48} and rest
        ):  # a colour of 256 or of 16 million, whose numbers are no styles
            size = 2 if rest[0] == 5 else 4  # noqa: PLR2004
            result += [code, *rest[:size]]
            del rest[:size]
        elif code == 2:  # noqa: PLR2004
            result.append(5)
        elif code == 22:  # noqa: PLR2004
            result += [22, 25]
        else:
            result.append(code)
    return result


# ---------------------------------------------------------------- recording


def record(command: Sequence[str], folder: Path, settings: Path) -> Iterator[Chunk]:
    """Run a command on a pseudo-terminal, and yield what it prints.

    Args:
        command: The program and its arguments.
        folder: The working directory.
        settings: The folder of cloudtrain's own records, in place of the user's.

    Raises:
        SystemExit: The command failed, or took longer than five minutes.

    """
    terminal, other_end = pty.openpty()
    fcntl.ioctl(other_end, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    process = subprocess.Popen(
        command,
        stdin=other_end,
        stdout=other_end,
        stderr=other_end,
        cwd=folder,
        env={**_environment(), "XDG_CONFIG_HOME": str(settings)},
        start_new_session=True,
    )
    os.close(other_end)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    started = time.monotonic()
    while True:
        seconds = time.monotonic() - started
        if seconds > LIMIT_SECONDS:
            process.kill()
            sys.exit(f"{shlex.join(command)}: took longer than {LIMIT_SECONDS:.0f} seconds")
        if not select.select([terminal], [], [], 1.0)[0]:
            continue
        try:
            data = os.read(terminal, 65_536)
        except OSError:  # on Linux, what the end of a terminal is
            break
        if not data:
            break
        yield Chunk(time.monotonic() - started, decoder.decode(data))
    os.close(terminal)
    if process.wait() != 0:
        sys.exit(f"{shlex.join(command)}: ended with exit code {process.returncode}")


def _environment() -> dict[str, str]:
    """Return the environment without what changes a command's output, and with this interpreter's programs first."""
    unwanted = {"CI", "NO_COLOR", "COLUMNS", "LINES", "CLOUDTRAIN_HOME"}
    kept = {name: value for name, value in os.environ.items() if name not in unwanted}
    programs = Path(sys.executable).parent
    kept["PATH"] = f"{programs}:{kept.get('PATH', '')}"
    kept["TERM"] = "xterm-256color"
    return kept


# ---------------------------------------------------------------- screens


def play(shown: str, chunks: Iterable[Chunk]) -> Picture:
    """Return the screens of a recording, which begins with the command that is typed."""
    screen = Screen(COLUMNS, ROWS)
    stream = pyte.Stream(screen)
    picture = Picture()
    stream.feed("\x1b[1;32m$\x1b[0m ")
    picture.show(_read(screen), 0.6)
    for start in range(0, len(shown), 3):
        stream.feed(shown[start : start + 3])
        picture.show(_read(screen), 3 * KEY_SECONDS)
    picture.show(_read(screen), 0.5)
    stream.feed("\r\n")

    recorded = list(chunks)
    last = 0.0
    for _, group in groupby(recorded, key=lambda chunk: int(chunk.seconds / FRAME_SECONDS)):
        together = list(group)
        if picture.frames:
            picture.seconds[-1] = min(max(together[0].seconds - last, FRAME_SECONDS), LONGEST_PAUSE)
        stream.feed("".join(chunk.text for chunk in together))
        last = together[0].seconds
        picture.show(_read(screen), FRAME_SECONDS)
    stream.feed("\x1b[1;32m$\x1b[0m ")
    picture.show(_read(screen), FRAME_SECONDS)
    picture.seconds[-1] = LAST_SCREEN_SECONDS
    return picture


def _read(screen: Screen) -> Frame:
    return tuple(_read_row(screen, number) for number in range(ROWS))


def _read_row(screen: Screen, number: int) -> Row:
    cells = [screen.buffer[number][column] for column in range(COLUMNS)]
    pieces: list[Piece] = []
    column = 0
    for style, group in groupby(cells, key=_style):
        text = "".join(cell.data for cell in group)
        visible = text if style.background else text.rstrip()
        if visible:
            pieces.append(Piece(column, visible, style))
        column += len(text)
    return tuple(pieces)


def _style(cell: Any) -> Style:
    colour, background = cell.fg, cell.bg
    if cell.reverse:
        colour, background = background, colour
        if colour == "default":
            colour = BACKGROUND
        if background == "default":
            background = FOREGROUND
    return Style(
        colour=_colour(colour),
        background=_colour(background),
        bold=cell.bold,
        dim=cell.blink,
        italic=cell.italics,
        underline=cell.underscore,
    )


def _colour(name: str) -> str:
    """Return a colour of pyte, which is a name or six digits; nothing for the default."""
    if name == "default":
        return ""
    if name.startswith("#"):
        return name
    known = COLOURS.get(name.removeprefix("bright"))
    return known if known is not None else f"#{name}"


# ---------------------------------------------------------------- SVG


def draw(picture: Picture, label: str) -> str:
    """Return the recording as an SVG.

    Each different row is defined once. A screen is a list of references to rows, and the screens lie below each other:
    the animation moves the strip, so that one screen at a time is in the window.
    """
    width, height = round(COLUMNS * CELL_WIDTH + 2 * MARGIN), ROWS * CELL_HEIGHT + BAR + MARGIN
    window_height = ROWS * CELL_HEIGHT
    names: dict[Row, str] = {}
    screens: list[str] = []
    for number, frame in enumerate(picture.frames):
        uses: list[str] = []
        for line, row in enumerate(frame):
            if not row:
                continue
            name = names.setdefault(row, f"r{len(names)}")
            uses.append(f'<use href="#{name}" y="{number * window_height + line * CELL_HEIGHT}"/>')
        screens.append("".join(uses))
    rows = "\n".join(f'<g id="{name}">{_draw_row(row)}</g>' for row, name in names.items())
    strip = "\n".join(screens)
    last = (len(picture.frames) - 1) * window_height
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" \
aria-label="{html.escape(label)}">
<title>{html.escape(label)}</title>
<style>
text{{font:{FONT_SIZE}px {FONTS};fill:{FOREGROUND};white-space:pre}}
.b{{font-weight:700}}.d{{opacity:.6}}.i{{font-style:italic}}.u{{text-decoration:underline}}
#strip{{transform:translateY(-{last}px)}}
@media (prefers-reduced-motion:no-preference){{#strip{{animation:play {sum(picture.seconds):.2f}s step-end infinite}}}}
@keyframes play{{{_keyframes(picture, window_height)}}}
</style>
<defs>
{rows}
</defs>
<rect width="{width}" height="{height}" rx="8" fill="{BACKGROUND}"/>
<circle cx="20" cy="17" r="5.5" fill="#ff5f57"/><circle cx="38" cy="17" r="5.5" fill="#febc2e"/>\
<circle cx="56" cy="17" r="5.5" fill="#28c840"/>
<svg x="{MARGIN}" y="{BAR}" width="{width - MARGIN}" height="{window_height}" overflow="hidden"><g id="strip">
{strip}
</g></svg>
</svg>
"""


def _keyframes(picture: Picture, window_height: int) -> str:
    total = sum(picture.seconds)
    passed = 0.0
    steps: list[str] = []
    for number, seconds in enumerate(picture.seconds):
        steps.append(
            f"{100 * passed / total:.3f}%{{transform:translateY(-{number * window_height}px)}}"
        )
        passed += seconds
    steps.append(f"100%{{transform:translateY(-{(len(picture.frames) - 1) * window_height}px)}}")
    return "".join(steps)


def _draw_row(row: Row) -> str:
    return "".join(_draw_piece(piece) for piece in row)


def _draw_piece(piece: Piece) -> str:
    """Draw a piece of text with the width of its cells, whatever font the reader's system has."""
    x = round(piece.column * CELL_WIDTH, 2)
    length = round(len(piece.text) * CELL_WIDTH, 2)
    style = piece.style
    marks = [
        mark
        for mark, is_set in zip(
            "bdiu", (style.bold, style.dim, style.italic, style.underline), strict=True
        )
        if is_set
    ]
    attributes = f' class="{" ".join(marks)}"' if marks else ""
    if style.colour:
        attributes += f' style="fill:{style.colour}"'
    drawn = (
        f'<text x="{x:g}" y="14" textLength="{length:g}" lengthAdjust="spacingAndGlyphs"{attributes}'
        f' xml:space="preserve">{html.escape(piece.text, quote=False)}</text>'
    )
    if not style.background:
        return drawn
    return f'<rect x="{x:g}" width="{length:g}" height="{CELL_HEIGHT}" fill="{style.background}"/>{drawn}'


def main(arguments: Sequence[str] | None = None) -> None:
    """Record a command and write its picture."""
    parser = argparse.ArgumentParser(description="Record a command as an animated SVG.")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("demo.svg"))
    parser.add_argument("command", nargs="*", help=f"default: {DEMO}")
    options = parser.parse_args(arguments)
    command = options.command or shlex.split(DEMO)
    with (
        tempfile.TemporaryDirectory(prefix="cloudtrain-") as folder,
        tempfile.TemporaryDirectory() as settings,
    ):
        # A copy of the examples, so that this working tree gets no run and the picture none of its paths.
        shutil.copytree(REPOSITORY / "examples", Path(folder) / "examples")
        picture = play(shlex.join(command), record(command, Path(folder), Path(settings)))
    text = draw(picture, f"A terminal that runs: {shlex.join(command)}")
    size = len(text.encode())
    if size >= LARGEST_BYTES:
        sys.exit(
            f"{options.out}: {size} bytes, and at most {LARGEST_BYTES} are wanted; not written"
        )
    options.out.write_text(text, encoding="utf-8")
    print(
        f"{options.out}: {len(picture.frames)} screens, {sum(picture.seconds):.0f} s, {size} bytes"
    )


if __name__ == "__main__":
    main()
