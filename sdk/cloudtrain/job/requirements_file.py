"""Reading of `code.requirements`, as far as it says where pip finds the packages."""

from __future__ import annotations

_OWN_SOURCES = ("-i", "--index-url", "--extra-index-url", "-f", "--find-links", "--no-index", "-r", "--requirement")
_LOCAL = ("-", "#", ".", "/")


def needs_pypi(text: str) -> bool:
    """Whether requirements name packages and no other index, folder or file, so that pip asks PyPI for them."""
    lines = [line.strip() for line in text.splitlines()]
    names_packages = any(line and not line.startswith(_LOCAL) and "://" not in line for line in lines)
    return names_packages and not any(line.startswith(_OWN_SOURCES) for line in lines)
