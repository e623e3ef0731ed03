"""What a job's requirements file names, and lines of it that pip could not install in a container.

The file is read as pip reads it: comments, continued lines, encodings with a byte order mark, files that it includes.
"""

from __future__ import annotations

import codecs
import os
import re
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from cloudtrain.catalog.packages import normalized
from cloudtrain.secrets.values import contains_url_credentials
from cloudtrain.support.container_paths import below_code
from cloudtrain_runtime.contract.lazy_pattern import lazy_pattern
from cloudtrain_runtime.contract.redaction import redact

_BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
"""Longer marks first: that of UTF-32 begins with that of UTF-16. pip knows the same."""
_COMMENT = lazy_pattern(r"(?:^|\s)#.*$")
_INCLUDES = lazy_pattern(
    r"(?:-r|--requirement|-c|--constraint)(?:\s*=\s*|\s+|(?<=-[rc]))(?P<file>\S.*)"
)
_OTHER_SOURCES = lazy_pattern(r"-i|-f|--(?:extra-)?index-url|--find-links|--no-index")
"""Options by which pip does not ask PyPI, or not only."""
_EDITABLE = lazy_pattern(r"(?:-e|--editable)(?:\s*=\s*|\s+|(?<=-e))(?P<what>\S.*)")
_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?"
_VERSIONS = r"(?:===|==|~=|!=|<=|>=|<|>)\s*[^\s,;()]+"
_OPTIONS = r"(?:\s+-[\w-]+(?:[=\s](?!-)\S+)?)*"
_REQUIREMENT = lazy_pattern(
    rf"(?P<name>{_NAME})\s*(?P<extras>\[[^\]]*\])?\s*(?:@\s*(?P<url>\S+)|\(?(?P<versions>{_VERSIONS}(?:\s*,\s*{_VERSIONS})*)?"
    rf"\s*,?\s*\)?)\s*(?P<marker>;.*?)?{_OPTIONS}\s*"
)
_CONDA = lazy_pattern(rf"(?P<name>{_NAME})(?:\s*=\s*|\s+)(?P<version>\d[\w.]*)(?:[\s=].*)?")
"""A line of `conda list`, or of `conda list --export`: name, version and build."""
_SCHEME = lazy_pattern(r"(?:[a-z]+\+)?(?:https?|ssh|git|ftp|s3|svn|hg|bzr)://|git\+", re.IGNORECASE)
_ARCHIVE = lazy_pattern(r"\.(?:whl|zip|tar\.gz|tgz|tar\.bz2|tar\.xz)(?:$|#|\[)", re.IGNORECASE)
_CONDA_ARCHIVE = lazy_pattern(
    r"://\S+/(?:noarch|linux-\w+|osx-\w+|win-\w+)/\S+\.(?:conda|tar\.bz2)(?:$|#)"
)
_PROJECT_FILES = ("pyproject.toml", "setup.py")
_MOST_FILES = 50


@dataclass(frozen=True)
class Line:
    """One requirement of a requirements file.

    Attributes:
        place: File and line, as `requirements.txt:2`.
        text: The line, without comment and password.
        name: Name of the package in normalised form, or None for a folder, file or address.
        versions: Comparisons of its version, such as `==2.3.0`; empty if there are none.
        is_conditional: Whether a marker limits it to some machines or versions of Python.
        is_folder: Whether it is a project of the code folder, such as `-e .`.
        extras: Its extras as they are written, such as `[train]`; empty if there are none.
        is_indexed: Whether pip looks for it in an index: it is no folder, file or address.
    """

    place: str
    text: str
    name: str | None = None
    versions: tuple[str, ...] = ()
    is_conditional: bool = False
    is_folder: bool = False
    extras: str = ""
    is_indexed: bool = False


@dataclass(frozen=True)
class Fault:
    """A line that pip could not install in a container.

    Attributes:
        message: Place, line and what is wrong.
        hint: What to do.
    """

    message: str
    hint: str


@dataclass(frozen=True)
class Requirements:
    """What a requirements file and the files that it includes contain.

    Attributes:
        lines: What pip installs.
        faults: What it could not install in a container.
        files: Files and folders of the code folder that they name, relative to it.
        is_complete: Whether all included files were read.
        has_other_sources: Whether they name an index or a folder of wheels, or include a file that was not read.
    """

    lines: tuple[Line, ...] = ()
    faults: tuple[Fault, ...] = ()
    files: tuple[str, ...] = ()
    is_complete: bool = True
    has_other_sources: bool = False

    @property
    def needs_pypi(self) -> bool:
        """Whether pip certainly asks PyPI for packages."""
        return not self.has_other_sources and any(each.is_indexed for each in self.lines)

    @property
    def names(self) -> frozenset[str] | None:
        """The packages, in normalised form; None if there are others, without a name."""
        names = {each.name for each in self.lines}
        if None in names or not self.is_complete:
            return None
        return frozenset(filter(None, names))

    @property
    def extras(self) -> tuple[str, ...]:
        """The packages with extras, such as `sentence-transformers[train]`, which pip installs more packages for."""
        return tuple(sorted({f"{each.name}{each.extras}" for each in self.lines if each.extras}))


def read_requirements(directory: Path, name: str, *, has_own_image: bool = False) -> Requirements:
    """Return what a requirements file contains. Nothing is installed, and no index is asked.

    Args:
        directory: The code folder, in which pip starts.
        name: Path of the file below it.
        has_own_image: Whether the job has an image of its own, so that a path outside of the code may be there.
    """
    reader = _Reader(directory, has_own_image=has_own_image)
    reader.read(name, is_constraint=False)
    return Requirements(
        lines=tuple(reader.lines),
        faults=tuple(reader.faults),
        files=tuple(dict.fromkeys(reader.files)),
        is_complete=reader.is_complete,
        has_other_sources=reader.has_other_sources,
    )


def _decode(data: bytes) -> str:
    """Return the text of a requirements file: in UTF-8, or as its byte order mark says, as PowerShell writes it."""
    for mark, encoding in _BYTE_ORDER_MARKS:
        if data.startswith(mark):
            return data.decode(encoding, "replace")
    return data.decode("utf-8", "replace")


class _Reader:
    """Reads a requirements file and those that it includes."""

    def __init__(self, directory: Path, *, has_own_image: bool) -> None:
        self.directory = directory
        self.has_own_image = has_own_image
        self.lines: list[Line] = []
        self.faults: list[Fault] = []
        self.files: list[str] = []
        self.is_complete = True
        self.has_other_sources = False
        self._seen: set[str] = set()

    def read(self, name: str, *, is_constraint: bool) -> None:
        if name in self._seen or len(self._seen) >= _MOST_FILES:
            return
        self._seen.add(name)
        try:
            data = (self.directory / name).read_bytes()
        except (OSError, ValueError):
            self.is_complete = False
            return
        if b"\0" in data and not data.startswith(tuple(mark for mark, _ in _BYTE_ORDER_MARKS)):
            self.is_complete = False
            hint = "save it as UTF-8; in PowerShell: pip freeze | Out-File -Encoding utf8 requirements.txt"
            self.faults.append(Fault(f"{name} is no text that pip can read", hint))
            return
        for number, text in _logical_lines(_decode(data)):
            self._read_line(name, f"{name}:{number}", text, is_constraint=is_constraint)

    def _read_line(self, file: str, place: str, text: str, *, is_constraint: bool) -> None:
        if contains_url_credentials(text):
            hint = (
                "remove it: the file is stored with the code. Put a wheel of the package into the code folder, or name "
                "an index that needs no password in code.env.PIP_EXTRA_INDEX_URL"
            )
            self._add_fault(place, text, "has a password or token in its address", hint)
            self.is_complete = False
            self.has_other_sources = True
            return
        included = _INCLUDES.fullmatch(text)
        if included is not None:
            is_nested = is_constraint or text.startswith(("-c", "--constraint"))
            self._include(file, place, text, included["file"].strip("\"'"), is_constraint=is_nested)
            return
        if _OTHER_SOURCES.match(text):
            self.has_other_sources = True
        if text.startswith("-") and _EDITABLE.fullmatch(text) is None:
            if text.startswith("- "):
                hint = "a file of pip has one requirement per line, without dashes"
                self._add_fault(place, text, "is a line of conda's environment.yml", hint)
            return
        if not is_constraint:
            self._read_requirement(place, text)

    def _include(self, file: str, place: str, text: str, name: str, *, is_constraint: bool) -> None:
        is_elsewhere = "://" in name or "$" in name
        path = os.path.normpath(PurePosixPath(file).parent / name)
        if is_elsewhere or not self._is_file(place, text, path, "no such file"):
            self.is_complete = False
            # Constraints bring no package.
            self.has_other_sources = self.has_other_sources or not is_constraint
            return
        self.files.append(path)
        self.read(path, is_constraint=is_constraint)

    def _read_requirement(self, place: str, text: str) -> None:
        editable = _EDITABLE.fullmatch(text)
        # Single spaces: the pattern would try all divisions of a long gap.
        what = " ".join((text if editable is None else editable["what"]).split())
        found = _REQUIREMENT.fullmatch(what)
        is_conditional = ";" in what
        address = what if found is None else found["url"] or what
        if "$" in what and found is None:
            # pip replaces the variables first.
            self.lines.append(Line(place, redact(text)))
        elif found is not None and found["url"] is None and not _is_local(self.directory, what):
            versions = tuple(
                each.strip() for each in (found["versions"] or "").split(",") if each.strip()
            )
            self.lines.append(
                Line(
                    place=place,
                    text=text,
                    name=normalized(found["name"]),
                    versions=versions,
                    is_conditional=is_conditional,
                    extras=_extras(found),
                    is_indexed=True,
                )
            )
        elif _CONDA_ARCHIVE.search(what):
            self._add_fault(place, text, "is a package of conda", "name the package on PyPI")
        elif _SCHEME.match(address):
            egg = re.search(rf"[#&]egg=({_NAME})", address)
            name = found["name"] if found is not None else egg and egg[1]
            self.lines.append(
                Line(
                    place=place,
                    text=redact(text),
                    name=None if name is None else normalized(name),
                    is_conditional=is_conditional,
                    extras="" if found is None else _extras(found),
                )
            )
        elif (
            address.startswith("file:")
            or _is_local(self.directory, address)
            or editable is not None
        ):
            self.lines.append(
                Line(
                    place=place,
                    text=text,
                    name=None if found is None else normalized(found["name"]),
                    is_conditional=is_conditional,
                    is_folder=_ARCHIVE.search(address) is None,
                )
            )
            if not is_conditional:
                self._check_path(place, text, address)
        else:
            self.lines.append(Line(place, text))
            self._add_fault(place, text, *_describe_broken(what))

    def _check_path(self, place: str, text: str, address: str) -> None:
        """Find out whether a file or folder that a line names is in the container, too."""
        path = re.sub(r"\[[\w\s,.-]*\]$", "", address.partition("#")[0].strip().strip("\"'"))
        if path.startswith("file:"):
            path = urllib.parse.unquote(re.sub(r"^file:(?://[^/]*)?", "", path))
        path = below_code(path)
        path = os.path.normpath(path.split(" ")[0])
        if not self._is_file(place, text, path, "no such file or folder"):
            return
        self.files.append(path)
        folder = self.directory / path
        if folder.is_dir() and not any((folder / name).is_file() for name in _PROJECT_FILES):
            what = "the code folder" if path == "." else path
            self._add_fault(
                place,
                text,
                f"{what} has no pyproject.toml or setup.py",
                f"write one, or remove the line: what is in {what} travels with the code",
            )

    def _is_file(self, place: str, text: str, path: str, missing: str) -> bool:
        """Return whether a path is in the code folder; add a fault if it is not, and no image can have it."""
        is_outside = path.startswith(("/", "..")) or re.match(r"[A-Za-z]:[\\/]", path) is not None
        if is_outside and path.startswith("/") and self.has_own_image:
            return False
        if is_outside:
            hint = "copy it into the code folder, or name the package on PyPI"
            if "@" in text or "croot" in text:
                # A line of pip freeze in an environment of conda.
                hint = (
                    "name the version on PyPI, such as numpy==2.1.0 (pip list --format=freeze writes versions without "
                    "paths)"
                )
            self._add_fault(
                place, text, f"{path} is outside of the code folder, and does not travel", hint
            )
            return False
        if (self.directory / path).exists():
            return True
        self._add_fault(
            place, text, f"{missing}: {path}", "relative paths start at the code folder"
        )
        return False

    def _add_fault(self, place: str, text: str, message: str, hint: str) -> None:
        self.faults.append(Fault(f"{place}: {redact(text)}: {message}", hint))


def _extras(requirement: re.Match[str]) -> str:
    """Return a requirement's extras with their brackets; empty without any, as in `name[]`."""
    extras = requirement["extras"] or ""
    return extras if extras.strip("[] ") else ""


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines that say something with their numbers; a backslash at the end continues a line."""
    begin = 0
    joined = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if not joined:
            begin = number
        if line.endswith("\\") and not line.lstrip().startswith("#"):
            joined += line[:-1] + " "
            continue
        found = _COMMENT.sub("", joined + line).strip()
        joined = ""
        if found:
            yield begin, found
    if found := _COMMENT.sub("", joined).strip():
        yield begin, found


def _is_local(directory: Path, text: str) -> bool:
    """Return whether a requirement is a path, by pip's rules: it has a slash and exists, or is an archive."""
    path = text.partition(";")[0].strip()
    if path.startswith((".", "/", "~")) or re.match(r"[A-Za-z]:[\\/]", path):
        return True
    if "@" in path or "=" in path:
        return False
    if _ARCHIVE.search(path):
        return True
    return "/" in path and (directory / PurePosixPath(path)).exists()


def _describe_broken(text: str) -> tuple[str, str]:
    conda = _CONDA.fullmatch(text)
    if conda is not None:
        hint = f"for pip write {conda['name']}=={conda['version']}, if PyPI has the package"
        return "is a line of conda list, which pip cannot read", hint
    if text.startswith(("pip install ", "pip3 install ")):
        return "is a command", "write what follows pip install, one package per line"
    return (
        "is no requirement",
        "write name, name==1.2, a path or an address (PEP 508), or put # before it",
    )


def rejects(versions: tuple[str, ...], major: int, minor: int) -> bool:
    """Return whether comparisons of a version certainly exclude all releases of `major.minor`."""
    return any(_rejects(each, (major, minor)) for each in versions)


def _rejects(comparison: str, version: tuple[int, int]) -> bool:
    found = re.fullmatch(
        r"(===|==|~=|<=|>=|<|>)\s*v?(\d+)(?:\.(\d+))?(\.\d+)?(\.\*)?.*", comparison
    )
    if found is None:
        return False
    sign = found[1]
    minor = found[3]
    named = (int(found[2]), int(minor or 0))
    has_patch = found[4] is not None and found[4].strip(".0") != ""
    is_other_major = version[0] != named[0]
    if sign in ("==", "==="):
        # ==2.* allows every minor release.
        is_any_minor = minor is None and "*" in comparison
        return is_other_major or (version != named and not is_any_minor)
    if sign == "~=":
        # ~=2.5.1 means ==2.5.*, and ~=2.5 means >=2.5, ==2.*
        is_other_minor = version != named if found[4] else version < named
        return is_other_major or is_other_minor
    if sign == "<":
        return version > named or (version == named and not has_patch)
    if sign == "<=":
        return version > named
    return version < named


def excludes_from(versions: tuple[str, ...], first: str) -> bool:
    """Return whether comparisons of a version certainly exclude the release `first` and all newer ones."""
    return any(_excludes_from(each, _release(first)) for each in versions)


def _excludes_from(comparison: str, first: tuple[int, ...]) -> bool:
    found = re.fullmatch(
        r"(===|==|~=|<=|<)\s*v?(\d+(?:\.\d+)*)(\.\*)?(?:\.?post\d+|\+\S+)?", comparison
    )
    if found is None:
        return False
    sign = found[1]
    release = _release(found[2])
    if sign == "~=":
        # ~=1.23.4 means >=1.23.4, ==1.23.*
        release = release[:-1]
    if sign == "~=" or found[3] is not None:
        return release < first[: len(release)]
    length = max(len(release), len(first))
    named, wanted = ((*each, *[0] * (length - len(each))) for each in (release, first))
    return named <= wanted if sign == "<" else named < wanted


def _release(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))
