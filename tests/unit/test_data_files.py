from pathlib import Path

from cloudtrain.support.data_files import data_files


def names(folder: Path) -> list[str]:
    return [file.name for file in data_files(folder)]


def test_links_to_files_and_folders_are_followed(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "b").write_text("b")
    data = tmp_path / "data"
    (data / "deep").mkdir(parents=True)
    (data / "a").write_text("a")
    (data / "deep" / "linked").symlink_to(other)
    (data / "file").symlink_to(other / "b")
    (data / "dead").symlink_to(other / "none")
    assert names(data) == ["a", "deep/linked/b", "file"]
    assert names(data / "a") == ["a"]
    assert names(tmp_path / "none") == []


def test_a_loop_of_links_ends(tmp_path: Path) -> None:
    data = tmp_path / "data"
    (data / "deep").mkdir(parents=True)
    (data / "a").write_text("a")
    (data / "deep" / "up").symlink_to(data)
    (data / "deep" / "own").symlink_to(".")
    other = tmp_path / "other"
    other.mkdir()
    (other / "back").symlink_to(data)
    (other / "c").write_text("c")
    (data / "there").symlink_to(other)
    assert names(data) == ["a", "there/c"]


def test_a_folder_that_cannot_be_listed_is_reported(tmp_path: Path) -> None:
    errors: list[OSError] = []
    assert list(data_files(tmp_path / "none", on_error=errors.append)) == []
    assert isinstance(errors[0], FileNotFoundError)
