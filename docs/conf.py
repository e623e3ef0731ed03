"""Sphinx configuration of the documentation site; `make docs` builds it."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

DOCS = Path(__file__).parent
GPU_PAGE = DOCS.parent / "benchmarks" / "gpu_figures.py"

project = "cloudtrain"
author = "The cloudtrain authors"
version = release = version_of("cloudtrain")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]

# Every heading down to the third level has an anchor as on GitHub, so `page.md#heading` works in both places.
myst_heading_anchors = 3

autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
default_role = "literal"  # docstrings write `name`, as Markdown does
napoleon_use_ivar = True
napoleon_use_rtype = False

# Docstrings name types of other packages, whose documentation is not fetched, and internal types, which have no page.
nitpick_ignore_regex = [("py:.*", ".*")]

html_theme = "furo"
html_title = f"cloudtrain {version}"
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
html_show_sphinx = False

_LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|path:|#)([^)\s#]+)(?=\))")


def _offer_other_files_as_downloads(_: Sphinx, name: str, source: list[str]) -> None:
    """Mark links to files outside of docs/ as paths, because Sphinx would look for pages of that name."""
    folder = (DOCS / name).parent

    def mark(match: re.Match[str]) -> str:
        is_page = (folder / match[1]).resolve().is_relative_to(DOCS)
        return match[1] if is_page else f"path:{match[1]}"

    source[0] = _LINK.sub(mark, source[0])


def _mark_code_blocks(*arguments: Any) -> None:
    """Mark an indented block after a line that ends with a colon as code, as docstrings mean it."""
    lines: list[str] = arguments[-1]
    for index, (line, blank, first) in enumerate(zip(lines, lines[1:], lines[2:], strict=False)):
        indent = len(line) - len(line.lstrip())
        if (
            line.endswith(":")
            and not line.endswith("::")
            and not blank
            and first.startswith(" " * (indent + 4))
        ):
            lines[index] = f"{line}:"


def setup(app: Sphinx) -> None:
    """Connect what this site adds to Sphinx."""
    app.connect("autodoc-process-docstring", _mark_code_blocks, priority=100)  # before napoleon
    app.connect("source-read", _offer_other_files_as_downloads)
    if GPU_PAGE.is_file():  # a copy of this folder alone has none
        subprocess.run([sys.executable, str(GPU_PAGE)], check=True)  # writes reference/gpu.md
