"""Print what a machine with a GPU needs besides PyTorch and NumPy, as pip's requirements."""

import tomllib
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
FOR_TESTS = ("pytest", "psutil")

project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
print(*project["dependencies"], *FOR_TESTS, sep="\n")
