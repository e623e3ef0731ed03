"""Edits of a TOML file change the given values and keep all other bytes, however the file was written."""

import tomllib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloudtrain.errors import SettingsError
from cloudtrain.settings.toml_file import TomlFile

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


def test_a_replaced_value_changes_nothing_else() -> None:
    after = TomlFile(WRITTEN, "f").with_values(("profiles", "big"), {"bucket": "new"})
    assert after.text == WRITTEN.replace('"two # not a comment"', '"new"')
    after = TomlFile(WRITTEN, "f").with_values((), {"role": "new", "bucket": "other"})
    assert after.text == WRITTEN.replace("'arn'", '"new"').replace('bucket="one"', 'bucket="other"')


def test_a_replaced_list_keeps_the_comment_after_it() -> None:
    after = TomlFile(WRITTEN, "f").with_values((), {"subnets": ["subnet-c"]})
    assert 'subnets = ["subnet-c"]  # both\n\n# the large' in after.text


def test_an_equal_value_changes_nothing() -> None:
    assert (
        TomlFile(WRITTEN, "f").with_values((), {"subnets": ("subnet-a", "subnet-b")}).text
        == WRITTEN
    )


def test_a_new_value_comes_after_the_others_of_its_table() -> None:
    file = TomlFile(WRITTEN, "f").with_values((), {"region": "us-west-2"})
    file = file.with_values(("profiles", "big"), {"region": "eu-west-1"})
    assert '# both\nregion = "us-west-2"\n\n# the large account\n[profiles.big]\n' in file.text
    assert '# this is one\nregion = "eu-west-1"\n\n[ profiles' in file.text


def test_a_new_table_is_added_at_the_end() -> None:
    assert TomlFile("bucket = 'a'", "f").with_values(("profiles", "x.y"), {"bucket": "b"}).text == (
        'bucket = \'a\'\n\n[profiles."x.y"]\nbucket = "b"\n'
    )
    assert (
        TomlFile("", "f").with_values(("profiles", "x"), {"bucket": "b"}).text
        == '[profiles.x]\nbucket = "b"\n'
    )


def test_a_first_top_level_value_comes_before_the_tables() -> None:
    text = "# all of it\n\n# the large one\n[profiles.big]\nbucket = 'b'\n"
    assert TomlFile(text, "f").with_values((), {"bucket": "a"}).text == f'bucket = "a"\n\n{text}'


def test_a_new_value_does_not_separate_comment_and_header() -> None:
    text = "[profiles.a]\n# none yet\n\n# p\n\n# q\n[profiles.b]\nbucket = 'b'\n# end\n"
    file = TomlFile(text, "f").with_values(("profiles", "a"), {"bucket": "a"})
    file = file.with_values(("profiles", "b"), {"region": "r"})
    assert file.text == (
        '[profiles.a]\nbucket = "a"\n# none yet\n\n# p\n\n# q\n[profiles.b]\nbucket = \'b\'\nregion = "r"\n# end\n'
    )


def test_values_and_tables_are_removed() -> None:
    file = TomlFile(WRITTEN, "f")
    assert file.with_values((), {"bucket": None, "prefix": None}).text == WRITTEN.replace(
        'bucket="one"\n', ""
    )
    rest = file.without(("profiles", "big"))
    assert rest.values == {
        name: value for name, value in file.values.items() if name != "profiles"
    } | {"profiles": {"odd name": {"bucket": "three\n= lines"}}}
    assert "# the large account" in rest.text  # it may describe more than this table
    assert file.without(("profiles", "odd name")).text.endswith("# this is one\n\n")
    assert TomlFile("[profiles.x]\nbucket='b'\n", "f").without(("profiles", "x")).text == ""


def test_a_removed_table_leaves_the_comments_around_it() -> None:
    text = "# p0\n[profiles.a]\n# own\nbucket = 'x'\n\n# p1\n\n# p2\n[profiles.b]\nbucket = 'y'\n\n# [profiles.c]\n"
    rest = TomlFile(text, "f").without(("profiles", "a"))
    assert rest.text == "# p0\n\n# p1\n\n# p2\n[profiles.b]\nbucket = 'y'\n\n# [profiles.c]\n"
    assert rest.without(("profiles", "b")).text == "# p0\n\n# p1\n\n# p2\n\n# [profiles.c]\n"


def test_a_text_of_several_lines_stays_one_value() -> None:
    text = 'bucket = """one\n[profiles.x]\n# two"""\n\n[profiles.x]\n'
    file = TomlFile(text, "f")
    assert file.line_of("profiles", "x") == 5
    assert file.with_values((), {"region": "r"}).text == text.replace(
        '# two"""\n', '# two"""\nregion = "r"\n'
    )


def test_line_endings_are_kept() -> None:
    text = "bucket = 'a'\r\n[profiles.x]\r\nbucket = 'b'"
    after = TomlFile(text, "f").with_values(("profiles", "x"), {"bucket": "c", "region": "d"})
    assert after.text == 'bucket = \'a\'\r\n[profiles.x]\r\nbucket = "c"\r\nregion = "d"\r\n'


def test_each_value_has_a_line() -> None:
    file = TomlFile(WRITTEN, "f")
    assert file.line_of("role") == 2
    assert file.line_of("subnets") == 5
    assert file.line_of("profiles", "big") == 11
    assert file.line_of("profiles", "big", "bucket") == 13
    assert file.line_of("profiles", "odd name", "bucket") == 16
    assert file.line_of("prefix") is None
    inline = TomlFile("\nprofiles = {big = {bucket = 'a', region = 'b'}}\nprefix = 'p'\n", "f")
    assert inline.location_of("profiles", "big", "region") == "f:2"
    assert (
        TomlFile("\n[profiles]\nbig.bucket = 'a'\n", "f").location_of("profiles", "big", "bucket")
        == "f:3"
    )
    assert inline.location_of("bucket") == "f"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "profiles = {big = {bucket = 'a'}} # its\n",
            'profiles = {big = {bucket = "b",region = "r"}} # its\n',
        ),
        (
            "[profiles]\nbig = {bucket = 'a'} # its\n",
            '[profiles]\nbig = {bucket = "b",region = "r"} # its\n',
        ),
        (
            "[profiles]\nbig.bucket = 'a' # its\n",
            '[profiles]\nbig.bucket = "b" # its\nbig.region = "r"\n',
        ),
    ],
)
def test_inline_and_dotted_tables_are_edited(text: str, expected: str) -> None:
    file = TomlFile(text, "f").with_values(("profiles", "big"), {"bucket": "b", "region": "r"})
    assert file.text == expected
    assert file.with_values(("profiles", "big"), {"bucket": None}).values == {
        "profiles": {"big": {"region": "r"}}
    }
    assert "its" not in file.without(("profiles", "big")).text or text.startswith("profiles")
    assert not file.without(("profiles", "big")).values["profiles"]


def test_an_edit_that_would_change_other_values_is_refused() -> None:
    # tomlkit 0.15 puts the new table's header before `bucket`, which would then be a value of that table.
    file = TomlFile("profiles.big.bucket = 'a'\nbucket = 'b'\n", "f")
    with pytest.raises(SettingsError, match=r"^f:1: cannot change this table without") as caught:
        file.with_values(("profiles", "new"), {"bucket": "b"})
    assert "nothing was changed" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("bucket = \n", "f:1:10: Invalid value"),
        ("a = 'b'\nbucket 'x'\n", "f:2:8: Expected '=' after a key"),
        ("a = 'b'\nb = [\n'c',\n", "f:4:1: "),
        ("a = 1\na = 2\n", "f:2:"),
    ],
)
def test_a_syntax_error_has_line_and_column(text: str, place: str) -> None:
    with pytest.raises(SettingsError) as caught:
        TomlFile(text, "f")
    assert caught.value.message.startswith(place)


names = st.sampled_from(["role", "bucket", "a.b", "q\"'", "é", "x-y", "="])
texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
values = texts | st.lists(texts, max_size=3)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([(), ("profiles", "x"), ("profiles", "#=")]), names, values | st.none()
        )
    )
)
def test_edits_keep_every_other_value_and_comment(
    changes: list[tuple[tuple[str, ...], str, Any]],
) -> None:
    file = TomlFile(WRITTEN, "f")
    expected = tomllib.loads(WRITTEN)
    for table, name, value in changes:
        file = file.with_values(table, {name: value})
        inner = expected
        for part in table:
            inner = inner.setdefault(part, {})
        inner.pop(name, None) if value is None else inner.update({name: value})
    written = tomllib.loads(file.text)
    for table, name, _ in changes:
        inner, found = expected, written
        for part in table:
            inner, found = inner[part], found.get(part, {})
        assert found.get(name) == inner.get(name)
    assert "# the large account\n[profiles.big]\n# its bucket\n" in file.text
    assert "# zone a" in file.text
