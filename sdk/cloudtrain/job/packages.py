"""Packages that a job's code imports, and those that its requirements name. Nothing is imported or installed."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE_OF_MODULE = {
    "attr": "attrs",
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python-headless",
    "dateutil": "python-dateutil",
    "dotenv": "python-dotenv",
    "faiss": "faiss-cpu",
    "fitz": "pymupdf",
    "google": "protobuf",
    "huggingface_hub": "huggingface-hub",
    "hydra": "hydra-core",
    "lightning_fabric": "lightning-fabric",
    "mpl_toolkits": "matplotlib",
    "osgeo": "gdal",
    "PIL": "pillow",
    "pkg_resources": "setuptools",
    "pytorch_lightning": "pytorch-lightning",
    "sagemaker_training": "sagemaker-training",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "umap": "umap-learn",
    "yaml": "pyyaml",
}
"""PyPI package by the module that it provides, where the names differ."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_SEPARATORS = re.compile(r"[-_.]+")
_OWN_SOURCES = (
    "-i",
    "--index-url",
    "--extra-index-url",
    "-f",
    "--find-links",
    "--no-index",
    "-r",
    "--requirement",
)
_LOCAL = ("-", "#", ".", "/")


def imported_packages(node: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield the packages that a module certainly imports, each with the line.

    Imports below `if` and `try` do not count: a script that has them usually works without the package.
    """
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((_package(alias.name), child.lineno) for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and child.module and not child.level:
            names = (f"{child.module}.{alias.name}" for alias in child.names)
            yield from ((_package(name), child.lineno) for name in names)
        elif not isinstance(child, ast.If | ast.Try | ast.TryStar):
            yield from imported_packages(child)


def _package(module: str) -> str:
    """Return the package of a module; torch's TensorBoard writer needs the package of that name."""
    return (
        "tensorboard"
        if f"{module}.".startswith("torch.utils.tensorboard.")
        else module.partition(".")[0]
    )


def required_packages(path: Path) -> frozenset[str] | None:
    """Return the packages in a requirements file, in normalised form; None if it includes what has no name here.

    Such are other files, folders, addresses and a file that cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    options = (
        "--index-url",
        "--extra-index-url",
        "-i ",
        "--pre",
        "--find-links",
        "--trusted-host",
        "-c ",
        "--hash",
    )
    named = [line for line in lines if line and not line.startswith(options)]
    found = [_NAME.match(line) for line in named]
    if not all(found) or any("/" in line.partition(";")[0].partition("@")[0] for line in named):
        return None
    return frozenset(_SEPARATORS.sub("-", match[0]).lower() for match in found if match)


def needs_pypi(text: str) -> bool:
    """Whether requirements name packages and no other index, folder or file, so that pip asks PyPI for them."""
    lines = [line.strip() for line in text.splitlines()]
    names_packages = any(
        line and not line.startswith(_LOCAL) and "://" not in line for line in lines
    )
    return names_packages and not any(line.startswith(_OWN_SOURCES) for line in lines)
