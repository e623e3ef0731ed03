from pathlib import Path

import pytest

from cloudtrain.errors import SpecError, UserError
from cloudtrain.job.document import (
    SourceLocation,
    parse_document,
    parse_scalar,
    read_document,
)


def problem_of(text: str) -> str:
    try:
        return str(SpecError(parse_document(text, "job.yaml").problems))
    except SpecError as error:
        return str(error)


def test_every_value_and_key_has_its_place() -> None:
    document = parse_document(
        "name: a\ncluster:\n  instances: 2\nargs: [x, {deep: 1}]\n", "job.yaml"
    )
    assert document.data == {"name": "a", "cluster": {"instances": 2}, "args": ["x", {"deep": 1}]}
    assert document.location_of(("cluster", "instances")) == SourceLocation("job.yaml", 3, 14)
    assert document.location_of(("cluster", "instances"), is_key=True) == SourceLocation(
        "job.yaml", 3, 3
    )
    assert document.location_of(("args", 1, "deep")) == SourceLocation("job.yaml", 4, 18)
    assert document.location_of(("cluster", "missing")) == SourceLocation("job.yaml", 3, 3)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("3.0e-4", 3e-4),
        ("1_000", 1000),
        ("-7", -7),
        (".5", 0.5),
        ("no", "no"),
        ("on", "on"),
        ("12:30:45", "12:30:45"),
        ("0o17", "0o17"),
        ("2026-11-20", "2026-11-20"),
        ("true", True),
        ("~", None),
        ('"2"', "2"),
        ("'true'", "true"),
        (".inf", float("inf")),
        ("-.INF", float("-inf")),
    ],
)
def test_scalars_follow_yaml_1_2(text: str, value: object) -> None:
    assert parse_scalar(text) == value


def test_not_a_number_is_read() -> None:
    assert parse_scalar(".nan") != parse_scalar(".nan")


def test_a_duplicate_key_names_both_lines() -> None:
    assert problem_of("name: a\nname: b\n") == (
        "job.yaml:2:1  name: given twice; the first is on line 1; remove one"
    )


def test_a_tab_is_explained() -> None:
    text = problem_of("cluster:\n\tinstances: 2\n")
    assert text.startswith("job.yaml:2:1")
    assert "indent with spaces" in text


def test_broken_yaml_has_its_place() -> None:
    assert problem_of("a: [1, 2\nb: 3\n").startswith("job.yaml:2:")


def test_python_tags_are_not_executed(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    text = problem_of(f"a: !!python/object/apply:os.system ['touch {trap}']\nb: !mine x\n")
    assert "not allowed" in text
    assert not trap.exists()


def test_an_alias_bomb_is_refused_quickly() -> None:
    levels = "\n".join(f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 10)}]" for n in range(1, 12))
    assert "without aliases" in problem_of(f"l0: &l0 [x]\n{levels}\n")


def test_deep_nesting_is_refused() -> None:
    assert "nested" in problem_of("a: " + "[" * 5000 + "]" * 5000)
    assert "nested" in problem_of("a: " + "[" * 40 + "]" * 40)


def test_a_cycle_is_refused() -> None:
    assert "aliases" in problem_of("a: &a [*a]\n")


def test_a_huge_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("a: " + "x" * 2_000_000)
    with pytest.raises(SpecError, match="at most"):
        read_document(path)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        read_document(tmp_path / "job.yaml")
    with pytest.raises(UserError, match="is a folder"):
        read_document(tmp_path)
    path = tmp_path / "latin.yaml"
    path.write_bytes(b"name: a\nb: \xff\n")
    with pytest.raises(SpecError, match=r"latin\.yaml:2:1  not UTF-8"):
        read_document(path)


def test_a_list_at_the_top_is_refused() -> None:
    assert "expected a mapping" in problem_of("- a\n- b\n")


def test_an_empty_document_is_an_empty_mapping() -> None:
    assert parse_document("# nothing\n", "job.yaml").data == {}


def test_overrides_replace_and_create() -> None:
    document = parse_document("cluster: {spot: true}\n", "job.yaml")
    document.override(("cluster", "spot", "max_wait"), "3h", "--set cluster.spot.max_wait=3h")
    document.override(("train", "epochs"), 2, "--set train.epochs=2")
    assert document.data == {"cluster": {"spot": {"max_wait": "3h"}}, "train": {"epochs": 2}}
    assert document.location_of(("train", "epochs")) == SourceLocation("--set train.epochs=2")


COMMAS = {
    "{lr: 0,001}": ("0.001", "[0, 001]", '"0,001"'),
    "{lr: -0, 5}": ("-0.5", "[-0, 5]", '"-0,5"'),
    "{steps: 1,000}": ("1000", "[1, 000]", '"1,000"'),
    "{steps: 1,000,000}": ("1000000", "[1, 000, 000]", '"1,000,000"'),
    "{price: 1,000.50}": ("1000.50", "[1, 000.50]", '"1,000.50"'),
    "{lr: 1,5e-4}": ("1.5e-4", "[1, 5e-4]", '"1,5e-4"'),
    "{layers: 64,32}": ("64.32", "[64, 32]", '"64,32"'),
    "{layers: 64,32,16}": ("", "[64, 32, 16]", '"64,32,16"'),
    "{cost: 1,000 USD}": ("1000 USD", "[1, 000 USD]", '"1,000 USD"'),
    "{layers: {64, 32}}": ("64.32", "[64, 32]", '"64,32"'),
    "{name: v1,5}": ("", "[v1, 5]", '"v1,5"'),
}


@pytest.mark.parametrize("text", COMMAS)
def test_a_comma_in_a_number_is_refused(text: str) -> None:
    number, values, quoted = COMMAS[text]
    ways = [f"{number} for a number"] if number else []
    ways += [f"{values} for a list", f"{quoted} for text"]
    problem = problem_of(f"args: {text}\n")
    assert f"write {', or '.join(ways)}" in problem
    assert problem.startswith("job.yaml:1:")


def test_each_comma_in_a_mapping_is_named() -> None:
    problems = parse_document("{a: 0,001, b: 2, c: 1,000, d: 1,000 USD}", "job.yaml").problems
    assert [each.path for each in problems] == ["a", "c", "d"]


@pytest.mark.parametrize(
    "text", ["{1: null}", "{lr: 0, 001: ~}", "{1: 2, 3: 4}", '{a: 1, "2"}', "{a: 1, b}", "[0,001]"]
)
def test_numbers_as_names_stay_valid(text: str) -> None:
    assert parse_document(f"args: {text}", "job.yaml").problems == []


def test_a_comma_in_an_override_is_refused() -> None:
    with pytest.raises(UserError, match=r"0,001 is not one value") as caught:
        parse_scalar("{lr: 0,001}", "--set code.args={lr: 0,001}")
    assert str(caught.value).startswith("--set code.args={lr: 0,001}: ")


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("a: #2\n", "job.yaml:1:3  a: "),
        ("a:\n  b:   #2", "job.yaml:2:5  a.b: "),
        ("a:\n- #2\n- 3\n", "job.yaml:2:2  a[0]: "),
        ("a: {b: #2\n}\n", "job.yaml:1:7  a.b: "),
    ],
)
def test_a_value_that_is_a_comment_is_reported(text: str, place: str) -> None:
    (problem,) = parse_document(text, "job.yaml").problems
    hint = 'write 2, or "#2" for text with a #'
    assert str(problem) == f"{place}no value: #2 is a comment; {hint}"
    with pytest.raises(UserError, match="no value: #2 is a comment"):
        parse_scalar("#2")


@pytest.mark.parametrize(
    "text",
    [
        "a: # 2\n",
        "a: #2 of them\n",
        "a: #TODO\n",
        "a: #x\n  b: 1\n",
        "a:\n#2\n",
        "? a\n",
        "a: 1 #2\n",
        "a: #none\n",
        "a: {b: #on\n}\n",
    ],
)
def test_other_comments_are_comments(text: str) -> None:
    assert not parse_document(text, "job.yaml").problems
