"""Wheels of one module, written without a build."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable
from pathlib import Path


def write_wheel(
    folder: Path,
    name: str = "tiny",
    version: str = "1.0",
    *,
    text: str = "",
    requires: Iterable[str] = (),
) -> Path:
    """Write a wheel with one module of the package's name, and return its path.

    Args:
        folder: Where to; created if it does not exist.
        name: Name of the package and the module.
        version: Version of the package.
        text: Source of the module.
        requires: Requirements of the package.
    """
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    required = "".join(f"Requires-Dist: {each}\n" for each in requires)
    files = {
        f"{name}.py": text,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{required}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{each},,\n" for each in [*files, f"{info}/RECORD"])
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for each, content in files.items():
            wheel.writestr(each, content)
    return path
