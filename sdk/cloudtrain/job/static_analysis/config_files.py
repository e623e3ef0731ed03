"""Configuration files that a script's arguments name, and those of its Hydra folder. Nothing is imported."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from cloudtrain.job.static_analysis.syntax import Module
from cloudtrain.support.container_paths import below_code

_SUFFIXES = frozenset({".cfg", ".conf", ".gin", ".ini", ".json", ".py", ".toml", ".yaml", ".yml"})
_HYDRA = frozenset({"hydra.main", "hydra.initialize"})
_LARGEST_BYTES = 10**6
_MOST_FILES = 200


def named_files(directory: Path, words: Iterable[str]) -> Iterator[Path]:
    """Yield the configuration files of a code folder that words of a command line name.

    A word may also name a file of a folder that another one names, as in `--conf_dir configs 125M.yml`.

    Args:
        directory: The code folder.
        words: Values of options, words such as `--config=a.yaml`, and others.
    """
    given = [below_code(word.rpartition("=")[2]) for word in words]
    given = [word for word in given if word and "\0" not in word and not word.startswith("/")]
    folders = [directory, *(directory / word for word in given if (directory / word).is_dir())]
    for folder in folders:
        for word in given:
            path = Path(os.path.normpath(folder / word))
            if path.suffix in _SUFFIXES and path.is_relative_to(directory) and path.is_file():
                yield path


def hydra_files(directory: Path, modules: Iterable[Module]) -> Iterator[Path]:
    """Yield the YAML files in the folders that `hydra.main` reads.

    Args:
        directory: The code folder.
        modules: The modules of a script.
    """
    for module in modules:
        for name, call in module.named_calls:
            if name not in _HYDRA:
                continue
            for each in call.keywords:
                if each.arg == "config_path" and isinstance(each.value, ast.Constant):
                    folder = (directory / module.file).parent / str(each.value.value)
                    yield from _yaml_files(Path(os.path.normpath(folder)), directory)


def contains(files: Iterable[Path], texts: Iterable[str]) -> bool:
    """Return whether a file has one of the texts in a line that is no comment."""
    wanted = tuple(texts)
    return any(text in line for path in files for line in _lines(path) for text in wanted)


def _yaml_files(folder: Path, directory: Path) -> Iterator[Path]:
    if not folder.is_relative_to(directory) or folder == directory:
        return
    for count, path in enumerate(sorted(folder.rglob("*.yaml"))):
        if count >= _MOST_FILES:
            return
        yield path


def _lines(path: Path) -> Iterator[str]:
    try:
        if path.stat().st_size > _LARGEST_BYTES:
            return
        text = path.read_text("utf-8", "replace")
    except OSError:
        return
    for line in text.splitlines():
        if not line.lstrip().startswith(("#", ";", "//")):
            yield line
