"""Code folders for tests of bundles."""

from __future__ import annotations

from pathlib import Path

from cloudtrain.bundle import collect

ACCESS_KEY_ID = "AKIA" + "QYLPMN5HFZRT2XWC"


def write_tree(folder: Path, **files: str) -> Path:
    """Write files and return their folder. In a file's name, `__` means `/` and `_py` means `.py`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        path = folder / name.replace("__", "/").replace("_py", ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return folder


def user_file_names(folder: Path) -> list[str]:
    """Return the names of a bundle's files without those of cloudtrain."""
    return [
        entry.name for entry in collect(folder).entries if not entry.name.startswith("cloudtrain_")
    ]
