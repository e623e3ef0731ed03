"""The kernel's count of processes that it has ended for lack of memory."""

from pathlib import Path

import pytest

from cloudtrain_runtime.launcher import oom_kills
from cloudtrain_runtime.launcher.oom_kills import count_oom_kills, describe_oom_kills


@pytest.mark.parametrize(
    ("content", "number"),
    [
        ("nr_free_pages 6\noom_kill 3\npgfault 9\n", 3),
        ("nr_free_pages 6\n", None),
        ("oom_kill\noom_kill many\n", None),
        ("", None),
    ],
)
def test_the_count_is_read(tmp_path: Path, content: str, number: int | None) -> None:
    (tmp_path / "vmstat").write_text(content)
    assert count_oom_kills(tmp_path / "vmstat") == number


def test_a_system_without_the_file_has_no_count(tmp_path: Path) -> None:
    assert count_oom_kills(tmp_path / "vmstat") is None


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (3, 4, "; the kernel has ended 1 process for lack of memory"),
        (0, 2, "; the kernel has ended 2 processes for lack of memory"),
        (3, 3, ""),
        (None, 3, ""),
    ],
)
def test_only_kills_since_the_start_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int | None, after: int, said: str
) -> None:
    counts = tmp_path / "vmstat"
    counts.write_text(f"oom_kill {after}\n")
    monkeypatch.setattr(oom_kills, "_COUNTS", counts)
    assert describe_oom_kills(before) == said
