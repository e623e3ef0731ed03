"""Sphinx configuration of the documentation site; `make docs` builds it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).resolve().parent))
from repository_pages import with_links_to_pages, write_pages

DOCS = Path(__file__).resolve().parent
GPU_PAGE = DOCS.parent / "benchmarks" / "gpu_figures.py"
TESTS = DOCS.parent / "tests"

# Pages that the sidebar shows below another one. They are here and not in the pages, where GitHub would show the directive.
BELOW: Mapping[str, tuple[str, ...]] = {
    "how-to/tasks": ("loops", "recipes", "fine-tuning", "evaluation", "numerics"),
    "how-to/job-file": ("code", "secrets"),
    "how-to/checkpoints": ("checkpoint-traps", "resume", "recover"),
    "how-to/rehearse": ("rehearse-in-ci",),
    "how-to/debugging": ("../reference/errors",),
    "reference/job-yaml": ("request",),
    "reference/python": ("runtime",),
    "reference/permissions": ("outside-inputs",),
    "architecture": ("reference/modules",),
    "decisions/README": ("[0-9]*",),
}

project = "cloudtrain"
author = "The cloudtrain authors"
version = release = version_of("cloudtrain")
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence"]

# Of a block with prompts, only the commands are copied, without the prompt.
copybutton_prompt_text = "$ "

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
html_static_path = ["static"] if (DOCS / "static").is_dir() else []
html_css_files = ["site.css"]
html_title = f"cloudtrain {version}"
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
html_show_sphinx = False

_FOLDERS: dict[str, Path] = {}
"""The folder that the links of a page are relative to, of pages that show a file from elsewhere in the repository."""


def _complete_page(_: Sphinx, name: str, source: list[str]) -> None:
    """Lead links to files of the repository to the pages that show them, and add the pages below this one."""
    here = (DOCS / name).parent
    below = [page for page in BELOW.get(name, ()) if any(here.glob(f"{page}.md"))]
    if below:
        source[0] += "\n".join(["", "```{toctree}", ":hidden:", ":glob:", "", *below, "```", ""])
    folder = _FOLDERS.get(name, here)
    source[0] = with_links_to_pages(source[0], folder, name)


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
    app.connect("source-read", _complete_page)
    if GPU_PAGE.is_file():  # a copy of this folder alone has none
        subprocess.run([sys.executable, str(GPU_PAGE)], check=True)  # writes reference/gpu.md
        # Writes reference/aws-day.md.
        page = [sys.executable, "-m", "aws_day.page"]
        subprocess.run(page, check=True, env={**os.environ, "PYTHONPATH": str(TESTS)})
        _FOLDERS.update(write_pages())
