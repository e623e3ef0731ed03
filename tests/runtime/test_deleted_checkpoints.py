"""Deletion of checkpoints: only folders that a run of cloudtrain has written."""

from pathlib import Path

from cloudtrain_runtime.checkpoint.storage import WRITER_FILE, FolderStorage

WRITER = {"run": "first", "attempt": "0123abcd"}


def test_only_remains_of_deletions_are_deleted(tmp_path: Path) -> None:
    root = tmp_path / "saved"
    storage = FolderStorage(root)
    name = storage.commit(storage.reserve(5, WRITER), "{}")
    rest = root / ".deleting-step-00000003-77"
    rest.mkdir()
    (rest / WRITER_FILE).touch()
    theirs = [
        root / each
        for each in (".deleting-notes", ".deleting-step-00000001-9", ".deleting-step-00000002")
    ]
    for folder in theirs:
        folder.mkdir()
        (folder / "thesis.txt").touch()
    storage.delete(name)
    assert sorted(root.iterdir()) == sorted(theirs)
    assert all((folder / "thesis.txt").is_file() for folder in theirs)
