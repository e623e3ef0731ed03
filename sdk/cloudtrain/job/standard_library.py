"""Modules of the standard library of Python, which no package brings."""

from __future__ import annotations

import sys

STANDARD_LIBRARY = sys.stdlib_module_names | frozenset(
    {
        *("aifc", "annotationlib", "asynchat", "asyncore", "audioop", "cgi", "cgitb", "chunk"),
        *("compression", "crypt", "distutils", "imghdr", "imp", "lib2to3", "mailcap", "nis"),
        *("nntplib", "ossaudiodev", "pipes", "smtpd", "sndhdr", "spwd", "sunau", "telnetlib"),
        *("tomllib", "uu", "xdrlib"),
    }
)
"""Modules of the standard library of any Python of a container: of this one, and those that a version has removed."""
