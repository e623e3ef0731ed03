"""Pages of the documentation site that show files outside of docs/: examples, notebooks, sources, the changelog.

A link to such a file works in the repository as it is. For the site, each linked file becomes a page, so that a link shows
it and downloads nothing. The pages are written before a build, and git ignores them:

- `examples/NAME.md`: an example's README, then its job file and its code
- `files/PATH.md`: any other file of the repository that a page links to
- `changelog.md` and `contributing.md`
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).resolve().parent
REPOSITORY = DOCS.parent
EXAMPLES = REPOSITORY / "examples"

ROOT_PAGES = {"CHANGELOG.md": "changelog", "CONTRIBUTING.md": "contributing"}
GENERATED = ("examples", "files", *ROOT_PAGES.values())
"""What this module writes in docs/; .gitignore has the same names."""

LANGUAGES = {
    ".csv": "text",
    ".json": "json",
    ".py": "python",
    ".sh": "sh",
    ".tf": "text",
    ".toml": "toml",
    ".txt": "text",
    ".yaml": "yaml",
    ".yml": "yaml",
}
SHOWN = {*LANGUAGES, "", ".ipynb", ".md"}
"""Suffixes of the files that become pages. The empty one is that of LICENSE and Makefile."""

LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|path:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
MOST_LINES = 400
"""A longer file is cut, and its page says so."""


class Target(NamedTuple):
    """Where a link to a file of the repository leads on the site."""

    page: str
    """Name of the page, without suffix and relative to docs/."""
    anchor: str = ""


def target_of(path: Path) -> Target | None:
    """Return the page that shows a file or folder of the repository; None for one that is no page.

    Args:
        path: An absolute path, whose links are resolved.

    """
    if path.is_dir() and (path / "README.md").is_file():
        path /= "README.md"
    if path.is_relative_to(DOCS):
        page = path.relative_to(DOCS).with_suffix("").as_posix()
        return Target(page) if path.suffix == ".md" else None
    if not path.is_file() or not path.is_relative_to(REPOSITORY) or path.suffix not in SHOWN:
        return None
    if path.is_relative_to(EXAMPLES):
        return _target_of_example(path)
    name = path.relative_to(REPOSITORY).as_posix()
    return Target(ROOT_PAGES.get(name, f"files/{name.removesuffix('.md')}"))


def _target_of_example(path: Path) -> Target:
    if path == EXAMPLES / "README.md":
        return Target("examples/index")
    if path.suffix == ".ipynb":
        return Target(f"examples/{path.stem}")
    example = path.relative_to(EXAMPLES).parts[0]
    is_readme = path.name == "README.md"
    return Target(f"examples/{example}", "" if is_readme else f"#{anchor_of(path.name)}")


def anchor_of(heading: str) -> str:
    """Return the anchor of a heading, as MyST and GitHub make it."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def with_links_to_pages(text: str, folder: Path, page: str) -> str:
    """Return a page's text, whose links to files of the repository lead to the pages that show them.

    Args:
        text: MyST.
        folder: The folder that the text's links are relative to.
        page: The name of the page that gets the text.

    """

    def replace(match: re.Match[str]) -> str:
        path = (folder / match[1]).resolve()
        is_own_page = folder.is_relative_to(DOCS) and path.is_relative_to(DOCS)
        if is_own_page or not path.exists():
            return match[0]  # Sphinx finds the page, or warns that there is none
        target = target_of(path)
        here = (DOCS / page).parent
        if target is None:
            kind = "" if path.is_relative_to(DOCS) else "path:"
            return kind + os.path.relpath(path, here)
        anchor = match[2] or target.anchor
        return f"{os.path.relpath(DOCS / f'{target.page}.md', here)}{anchor}"

    return LINK.sub(replace, text)


# ---------------------------------------------------------------- writing


def write_pages() -> dict[str, Path]:
    """Write the pages, and return the folder that each one's links are relative to."""
    texts: dict[str, str] = {}
    folders: dict[str, Path] = {}
    waiting = [
        *_linked_by_docs(),
        *sorted(EXAMPLES.iterdir()),
        *(REPOSITORY / name for name in ROOT_PAGES),
    ]
    while waiting:
        path = waiting.pop()
        target = target_of(path)
        if target is None or target.page in texts or path.is_relative_to(DOCS):
            continue
        text, folder = _page(path, target.page)
        texts[target.page] = text
        folders[target.page] = folder
        waiting += _linked(text, folder)
    _write(texts)
    return folders


def _page(path: Path, page: str) -> tuple[str, Path]:
    """Return the text of a page, and the folder that its links are relative to."""
    if path.is_dir():
        path /= "README.md"
    if page == "examples/index":
        return f"{path.read_text(encoding='utf-8')}\n{_toctree_of_examples()}", path.parent
    if path.suffix == ".ipynb":
        return _notebook(path), path.parent
    if path.is_relative_to(EXAMPLES):
        return _example(EXAMPLES / path.relative_to(EXAMPLES).parts[0]), path.parent
    orphan = "" if page in ROOT_PAGES.values() else "---\norphan: true\n---\n\n"
    if path.suffix == ".md":
        return orphan + path.read_text(encoding="utf-8"), path.parent
    name = path.relative_to(REPOSITORY).as_posix()
    return f"{orphan}# {name}\n\n{_code(path)}", path.parent


def _toctree_of_examples() -> str:
    pages = [
        folder.name for folder in sorted(EXAMPLES.iterdir()) if (folder / "README.md").is_file()
    ]
    notebooks = sorted(path.stem for path in EXAMPLES.rglob("*.ipynb"))
    return "\n".join(["```{toctree}", ":hidden:", "", *pages, *notebooks, "```", ""])


def _example(folder: Path) -> str:
    """Return an example's README, followed by its job file and its other files."""
    readme = (folder / "README.md").read_text(encoding="utf-8")
    files = [f"## {path.name}\n\n{_code(path)}" for path in _files_of(folder)]
    return "\n".join([readme, *files])


def _files_of(folder: Path) -> list[Path]:
    files = [path for path in folder.iterdir() if path.is_file() and path.suffix in LANGUAGES]
    return sorted(files, key=lambda path: (path.suffix != ".yaml", path.name))


def _code(path: Path) -> str:
    lines = path.read_text(encoding="utf-8").splitlines()
    shown = lines[:MOST_LINES]
    language = LANGUAGES.get(path.suffix, "make" if path.name == "Makefile" else "text")
    note = ""
    if len(lines) > MOST_LINES:
        note = f"\nThe first {MOST_LINES} of {len(lines)} lines.\n"
    return "\n".join([f"````{language}", *shown, "````", note])


def _notebook(path: Path) -> str:
    """Return the cells of a notebook as Markdown. The notebooks of this repository have no outputs."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    parts: list[str] = []
    for cell in cells:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
    return "\n\n".join(parts) + "\n"


def _linked_by_docs() -> Iterator[Path]:
    for page in sorted(DOCS.rglob("*.md")):
        if page.relative_to(DOCS).parts[0].removesuffix(".md") not in {*GENERATED, "_build"}:
            yield from _linked(page.read_text(encoding="utf-8"), page.parent)


def _linked(text: str, folder: Path) -> Iterator[Path]:
    for link in LINK.finditer(text):
        path = (folder / link[1]).resolve()
        if path.exists() and not path.is_relative_to(DOCS):
            yield path


def _write(texts: dict[str, str]) -> None:
    """Write the pages that have changed, and delete those of earlier builds that nothing links to any more."""
    pages = {DOCS / f"{page}.md": text for page, text in texts.items()}
    for folder in ("examples", "files"):
        for path in (DOCS / folder).rglob("*.md"):
            if path not in pages:
                path.unlink(missing_ok=True)
    for path, text in pages.items():
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = path.with_suffix(f".{os.getpid()}")  # another build may read the page meanwhile
        whole.write_text(text, encoding="utf-8")
        whole.replace(path)
