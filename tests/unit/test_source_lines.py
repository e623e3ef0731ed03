"""On a terminal a problem of a file is followed by the line and a caret below its place."""

import contextlib
import os
import pty
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cloudtrain import console
from cloudtrain.console import source_lines
from cloudtrain.errors import CloudtrainError, Problem, SettingsError, SpecError
from cloudtrain.job.spec import load_job

Show = Callable[[CloudtrainError], list[str]]


@pytest.fixture(params=[80])
def columns(request: pytest.FixtureRequest) -> int:
    width: int = request.param
    return width


@pytest.fixture
def show(monkeypatch: pytest.MonkeyPatch, columns: int) -> Show:
    """Return a function that prints an error on a terminal and returns the lines without colours."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    # The files of these tests are newer than the process.
    monkeypatch.setattr(console, "_STARTED", time.time() + 60)

    def shown(error: CloudtrainError) -> list[str]:
        ours, theirs = pty.openpty()
        with os.fdopen(theirs, "w") as terminal, monkeypatch.context() as patched:
            patched.setattr("sys.stderr", terminal)
            console.print_error(error, as_json=False)
        text = b""
        # The terminal raises EIO after its writer has closed it.
        with contextlib.suppress(OSError):
            while data := os.read(ours, 65536):
                text += data
        os.close(ours)
        return re.sub(r"\x1b\[[0-9;]*m", "", text.decode()).splitlines()

    return shown


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path("job.yaml")


def problem(line: int, column: int, path: str = "", file: str = "job.yaml") -> SpecError:
    return SpecError([Problem(file, line, column, path, "is wrong")])


def problems_of(file: Path, text: str) -> SpecError:
    file.write_text(text)
    return SpecError(load_job(file).problems)


def test_the_key_or_value_is_marked(show: Show, file: Path) -> None:
    Path("a.py").write_text("")
    text = "name: demo\ncode: {script: a.py}\ncluster: {instance_type: ml.m5.xlarge}\n"
    assert show(problems_of(file, f"{text}checkpoint:\n  evry: 5 steps  # often\n")) == [
        'job.yaml:5:3  checkpoint.evry: unknown field; did you mean "every"?',
        "  5 |   evry: 5 steps  # often",
        "    |   ^^^^",
        "1 problem",
    ]
    assert show(problems_of(file, f"{text}limits: {{hang: a b, retries: 1}}\n"))[1:3] == [
        "  4 | limits: {hang: a b, retries: 1}",
        "    |                ^^^",
    ]


@pytest.mark.parametrize(
    ("line", "column", "carets"),
    [
        ("name: 'a b'  # c", 7, "^^^^^"),
        ('name: "a b', 7, "^^^^"),
        ("tags: {a: 1, b: {c: 2}} # d", 7, "^" * 17),
        ("tags: [a, [b", 7, "^" * 6),
        ("tags: [first one, b]", 8, "^" * 9),
        ("every: 10 steps # c", 8, "^" * 8),
        ("uri: s3://bucket/a:b", 6, "^" * 15),
        ("name:", 6, "^"),
        ("名前: 東京", 1, "^^^^"),
        ("名前: 東京", 5, "^^^^"),
        ("e\u0301e\u0301: x", 1, "^^"),
        ("a:\tb", 4, "^"),
        ("a: \x1b[31mb", 4, "^" * 6),
    ],
)
def test_carets_are_as_wide_as_the_token(
    show: Show, file: Path, line: str, column: int, carets: str
) -> None:
    file.write_text(f"first: 1\n{line}\n")
    _, source, marks, _ = show(problem(2, column))
    assert source.startswith("  2 | ")
    assert marks.startswith("    | ")
    assert marks.split("|")[1].strip() == carets


def test_wide_characters_before_the_place_move_the_caret(show: Show, file: Path) -> None:
    file.write_text("tags: {名: x, b: y}\n")
    _, source, marks, _ = show(problem(1, 14))
    assert source == "  1 | tags: {名: x, b: y}"
    # The character takes two columns.
    assert marks == "    | " + " " * 14 + "^"


@pytest.mark.parametrize("columns", [40, 80, 120], indirect=True)
@pytest.mark.parametrize("place", [1, 100, 400])
def test_a_long_line_is_cut_around_the_place(
    show: Show, file: Path, columns: int, place: int
) -> None:
    words = "".join(f"k{number:03}: v, " for number in range(60))
    file.write_text(f"tags: {{{words}}}\n")
    column = words.index("k", place) + 8
    _, source, marks, _ = show(problem(1, column))
    assert len(source) < columns
    assert "…" in source
    start = marks.index("^")
    assert source[start : start + len(marks.strip()) - 2].startswith("k")
    assert marks.strip("| ") == "^^^^"


def test_a_long_value_is_marked_as_far_as_it_is_shown(show: Show, file: Path) -> None:
    file.write_text(f"name: {'ab ' * 100}\n")
    _, source, marks, _ = show(problem(1, 7))
    assert len(source) < 80
    assert len(marks) < 80


def test_a_missing_field_has_no_line(show: Show, file: Path) -> None:
    assert [line.split()[0] for line in show(problems_of(file, "name: demo\n"))] == [
        "job.yaml:1:1",
        "job.yaml:1:1",
        "2",
    ]


@pytest.mark.parametrize(
    ("content", "line", "column"),
    [
        (None, 1, 1),
        (b"name: demo\n", 5, 1),
        (b"name: demo\n", 1, 40),
        (b"\n\n", 1, 1),
        (b"name: \xff\n", 1, 1),
        (b"a: b\n" * 300_000, 1, 1),
    ],
)
def test_a_file_without_the_place_shows_the_message_alone(
    show: Show, file: Path, content: bytes | None, line: int, column: int
) -> None:
    if content is not None:
        file.write_bytes(content)
    assert show(problem(line, column)) == [f"job.yaml:{line}:{column}  is wrong", "1 problem"]


@pytest.mark.parametrize(
    "line",
    [
        "env: {DB_PASSWORD: hunter2hunter2, PORT: x}",
        "args: [--password, hunter2hunter2]",
        "env: {HF: hf_abcdefghijklmnopqrstuvwxyzABCDEFGH}",
        "key: wJalrXUtnFEMIK7MDENGbPxRfiCYzzzz9aKEYaa1",
        'HF_TOKEN="hunter2 hunter2"',
        "'api key': hunter2hunter2",
        "args: [--wandb-key, hunter2hunter2]",
        "wandbKey: {a: hunter2hunter2}",
    ],
)
def test_a_line_with_a_secret_is_not_shown(show: Show, file: Path, line: str) -> None:
    file.write_text(f"{line}\n")
    shown = "\n".join(show(problem(1, 1)))
    assert "hunter2" not in shown
    assert "hf_abc" not in shown
    assert "wJalr" not in shown


@pytest.mark.parametrize(
    "above",
    [
        "DB_PASSWORD:",
        "DB_PASSWORD:\n  - another",
        "DB_PASSWORD: |\n  another",
        "env:\n  DB_PASSWORD:\n  - a\n  # why",
        "args:\n  - --wandb-key",
        "args: [--wandb-key,",
    ],
)
def test_a_value_below_the_name_of_a_secret_is_not_shown(
    show: Show, file: Path, above: str
) -> None:
    file.write_text(f"{above}\n  - hunter2hunter2\n")
    assert show(problem(above.count("\n") + 2, 5))[1:] == ["1 problem"]


def test_the_path_of_a_secret_is_not_shown(show: Show, file: Path) -> None:
    file.write_text("- hunter2hunter2\n")
    assert show(problem(1, 3, "env.DB_PASSWORD[0]"))[1:] == ["1 problem"]


def test_a_line_after_the_section_of_a_secret_is_shown(show: Show, file: Path) -> None:
    file.write_text("env:\n  DB_PASSWORD: a\n  PORT: 1\ntags:\n  team: x\n")
    assert show(problem(5, 3))[1:3] == ["  5 |   team: x", "    |   ^^^^"]


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("[DB_PASSWORD=hunter2hunter2]", "['DB_PASSWORD=***']; write env: {DB_PASSWORD: ***}"),
        (
            "[{name: DB_PASSWORD, value: hunter2hunter2}]",
            "[{'name': 'DB_PASSWORD', 'value': '***'}]; write env: {DB_PASSWORD: ***}",
        ),
        (
            "[{value: hunter2hunter2, name: DB_PASSWORD}]",
            "[{'value': '***', 'name': 'DB_PASSWORD'}]; write env: {DB_PASSWORD: ***}",
        ),
        ("[PORT=8000]", "['PORT=8000']; write env: {PORT: 8000}"),
    ],
)
def test_a_message_masks_secrets_by_their_names(file: Path, given: str, shown: str) -> None:
    Path("a.py").write_text("")
    code = f"code: {{script: a.py, env: {given}}}"
    error = problems_of(file, f"name: demo\n{code}\ncluster: {{instance_type: ml.m5.xlarge}}\n")
    assert error.problems[0].message.startswith("expected a mapping of fields, got ")
    assert error.problems[0].message.endswith(shown.partition(";")[0])
    assert str(error.problems[0]).endswith(shown)


def test_a_message_masks_the_value_of_a_secret(show: Show, file: Path) -> None:
    Path("a.py").write_text("")
    env = "env: {DB_PASSWORD: [hunter2hunter2]}"
    cluster = "cluster: {instance_type: ml.m5.xlarge}"
    shown = show(problems_of(file, f"name: demo\ncode: {{script: a.py, {env}}}\n{cluster}\n"))
    words = "expected text, got ['***']; write DB_PASSWORD: ***"
    assert shown == [f"job.yaml:2:41  code.env.DB_PASSWORD: {words}", "1 problem"]


def test_a_huge_line_is_measured_only_around_the_place(
    show: Show, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = 0

    def width(text: str) -> int:
        nonlocal measured
        measured += len(text)
        return len(text)

    monkeypatch.setattr(source_lines, "cell_count", width)
    read: list[str] = []

    def redact(text: str) -> str:
        read.append(text)
        return text

    monkeypatch.setattr(source_lines, "redact", redact)
    fields = ", ".join(f"f{number}: v" for number in range(5000))
    file.write_text(f"code: {{{fields}}}\n")
    columns = [match.start() + 1 for match in re.finditer("f", fields)]
    error = SpecError(
        [Problem("job.yaml", 1, 7 + column, "", "is wrong") for column in columns[:500]]
    )
    shown = show(error)
    assert len(read) == 1
    assert sum(line.startswith("  1 | ") for line in shown) == 10
    assert len(shown) == 500 + 2 * 10 + 1
    assert measured < 10 * 200 * 400, "not the 75,000 characters of the line each time"


def test_a_file_that_changed_meanwhile_is_not_shown(
    show: Show, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text("name: demo\n")
    monkeypatch.setattr(console, "_STARTED", time.time() - 60)
    assert len(show(problem(1, 1))) == 2


def test_a_setting_is_marked_too(show: Show, tmp_path: Path) -> None:
    file = tmp_path / "cloudtrain.toml"
    file.write_text("role = 'a'\n  bucket = [1, 2]\n")
    error = SettingsError(f"{file}:2: bucket must be text", "for example bucket = 'mine'")
    assert show(error)[-2:] == ["  2 |   bucket = [1, 2]", "    |   ^^^^^^"]
    error = SettingsError(f"{file}:2:12: Invalid value")
    assert show(error)[-2:] == ["  2 |   bucket = [1, 2]", "    |            ^^^^^^"]
    assert len(show(SettingsError("settings are missing: role"))) == 1


@pytest.mark.parametrize("variable", [("TERM", "dumb"), ("CI", "true")])
def test_only_a_terminal_shows_the_line(
    show: Show, file: Path, monkeypatch: pytest.MonkeyPatch, variable: tuple[str, str]
) -> None:
    file.write_text("name: demo\n")
    monkeypatch.setenv(*variable)
    assert len(show(problem(1, 1))) == 2


def test_code_is_marked_too(show: Show, tmp_path: Path, file: Path) -> None:
    Path("train.py").write_text("model = build(layers=1)\nimport torchx  # a\n")
    assert show(problem(1, 15, file="train.py"))[2] == "    | " + " " * 14 + "^^^^^^"
    assert show(problem(2, 1, file="train.py"))[2] == "    | " + "^" * 13
