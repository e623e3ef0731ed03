"""A value is changed in its place, and every other byte stays: whatever way the file was written in."""

import tomllib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloudtrain.errors import SettingsError
from cloudtrain.tables import Tables

WRITTEN = """\
# ours
role = 'arn' # the team's
bucket="one"

subnets = [
    "subnet-a",   # zone a
    "subnet-b",
]  # both

# the large account
[profiles.big]
# its bucket
bucket = "two # not a comment"   # this is one

[ profiles . "odd name" ]
bucket = '''three
= lines'''
"""


def test_a_value_is_replaced_and_all_else_stays() -> None:
    after = Tables(WRITTEN, "f").changed(("profiles", "big"), {"bucket": "new"})
    assert after.text == WRITTEN.replace('"two # not a comment"', '"new"')
    after = Tables(WRITTEN, "f").changed((), {"role": "new", "bucket": "other"})
    assert after.text == WRITTEN.replace("'arn'", '"new"').replace('bucket="one"', 'bucket = "other"')


def test_a_list_keeps_its_last_comment() -> None:
    after = Tables(WRITTEN, "f").changed((), {"subnets": ["subnet-c"]})
    assert 'subnets = ["subnet-c"]  # both\n\n# the large' in after.text


def test_an_equal_value_changes_nothing() -> None:
    assert Tables(WRITTEN, "f").changed((), {"subnets": ("subnet-a", "subnet-b")}).text == WRITTEN


def test_new_values_stand_behind_the_others_of_their_table() -> None:
    tables = Tables(WRITTEN, "f").changed((), {"region": "us-west-2"})
    tables = tables.changed(("profiles", "big"), {"region": "eu-west-1"})
    assert '# both\nregion = "us-west-2"\n\n# the large account\n[profiles.big]\n' in tables.text
    assert '# this is one\nregion = "eu-west-1"\n\n[ profiles' in tables.text


def test_a_table_that_is_not_there_is_begun_at_the_end() -> None:
    assert Tables("bucket = 'a'", "f").changed(("profiles", "x.y"), {"bucket": "b"}).text == (
        'bucket = \'a\'\n\n[profiles."x.y"]\nbucket = "b"\n'
    )
    assert Tables("", "f").changed(("profiles", "x"), {"bucket": "b"}).text == '[profiles.x]\nbucket = "b"\n'


def test_a_first_value_stands_above_the_tables_and_what_is_said_of_them() -> None:
    text = "# all of it\n\n# the large one\n[profiles.big]\nbucket = 'b'\n"
    assert Tables(text, "f").changed((), {"bucket": "a"}).text == (
        "# all of it\n\nbucket = \"a\"\n\n# the large one\n[profiles.big]\nbucket = 'b'\n"
    )


def test_a_value_and_a_table_are_taken_out() -> None:
    tables = Tables(WRITTEN, "f")
    assert tables.changed((), {"bucket": None, "prefix": None}).text == WRITTEN.replace('bucket="one"\n', "")
    rest = tables.without(("profiles", "big"))
    assert rest.values == {name: value for name, value in tables.values.items() if name != "profiles"} | {
        "profiles": {"odd name": {"bucket": "three\n= lines"}}
    }
    assert "# the large account" in rest.text  # what stands outside of the table may be about anything
    assert tables.without(("profiles", "odd name")).text.endswith("# this is one\n\n")
    assert Tables("[profiles.x]\nbucket='b'\n", "f").without(("profiles", "x")).text == ""


def test_the_ends_of_lines_stay() -> None:
    text = "bucket = 'a'\r\n[profiles.x]\r\nbucket = 'b'"
    after = Tables(text, "f").changed(("profiles", "x"), {"bucket": "c", "region": "d"})
    assert after.text == 'bucket = \'a\'\r\n[profiles.x]\r\nbucket = "c"\r\nregion = "d"\r\n'


def test_lines_are_known() -> None:
    tables = Tables(WRITTEN, "f")
    assert tables.line_of("role") == 2
    assert tables.line_of("subnets") == 5
    assert tables.line_of("profiles", "big") == 11
    assert tables.line_of("profiles", "big", "bucket") == 13
    assert tables.line_of("profiles", "odd name", "bucket") == 16
    assert tables.line_of("prefix") is None
    inline = Tables("\nprofiles = {big = {bucket = 'a', region = 'b'}}\nprefix = 'p'\n", "f")
    assert inline.place_of("profiles", "big", "region") == "f:2"
    assert Tables("\n[profiles]\nbig.bucket = 'a'\n", "f").place_of("profiles", "big", "bucket") == "f:3"
    assert inline.place_of("bucket") == "f"


@pytest.mark.parametrize(
    ("text", "table"),
    [
        ("profiles = {big = {bucket = 'a'}}\n", ("profiles", "big")),
        ("profiles = {big = {bucket = 'a', prefix = 'p'}}\n", ("profiles", "big")),
        ("[profiles]\nbig = {bucket = 'a'}\n", ("profiles", "big")),
        ("profiles = {big = {bucket = 'a'}}\n", ("profiles", "new")),
    ],
)
def test_what_cannot_be_changed_in_place_is_refused(text: str, table: tuple[str, ...]) -> None:
    with pytest.raises(SettingsError, match=r"^f(:\d)?: .*cannot be changed in place") as caught:
        Tables(text, "f").changed(table, {"bucket": "b", "region": "r"})
    assert "nothing was changed" in caught.value.hint


def test_dotted_values_are_changed() -> None:
    text = "[profiles]\nbig.bucket = 'a' # its\n"
    assert Tables(text, "f").changed(("profiles", "big"), {"bucket": "b"}).text == (
        '[profiles]\nbig.bucket = "b" # its\n'
    )


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("bucket = \n", "f:1:10: Invalid value"),
        ("a = 'b'\nbucket 'x'\n", "f:2:8: Expected '=' after a key"),
        ("a = 'b'\nb = [\n'c',\n", "f:4:1: "),
        ("a = 1\na = 2\n", "f:2:"),
    ],
)
def test_a_file_that_is_no_toml_is_told_with_line_and_column(text: str, place: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Tables(text, "f")
    assert caught.value.message.startswith(place)


names = st.sampled_from(["role", "bucket", "a.b", "q\"'", "é", "x-y", "="])
texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
values = texts | st.lists(texts, max_size=3)


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from([(), ("profiles", "x"), ("profiles", "#=")]), names, values | st.none())))
def test_whatever_is_written_is_read_again(changes: list[tuple[tuple[str, ...], str, Any]]) -> None:
    tables = Tables(WRITTEN, "f")
    expected = tomllib.loads(WRITTEN)
    for table, name, value in changes:
        tables = tables.changed(table, {name: value})
        inner = expected
        for part in table:
            inner = inner.setdefault(part, {})
        inner.pop(name, None) if value is None else inner.update({name: value})
    written = tomllib.loads(tables.text)
    for table, name, _ in changes:
        inner, found = expected, written
        for part in table:
            inner, found = inner[part], found.get(part, {})
        assert found.get(name) == inner.get(name)
    assert "# the large account\n[profiles.big]\n# its bucket\n" in tables.text
    assert "# zone a" in tables.text
