"""HTTP proxies of the environment: the variable that applies to an address, and this machine, which needs none."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

LOOPBACK_NAMES: Final = frozenset({"127.0.0.1", "localhost", "::1"})
"""Names of this machine."""

_PROXY_VARIABLES = ("http_proxy", "https_proxy", "all_proxy")
_EXCEPTIONS_VARIABLE = "no_proxy"
_EVERY_HOST = "*"
# Without ::1, which some versions of httpx refuse, and on which nothing of cloudtrain listens.
_EXCEPTIONS = ("127.0.0.1", "localhost")


def is_loopback(url: str) -> bool:
    """Return whether an address is on this machine."""
    return urlsplit(url).hostname in LOOPBACK_NAMES


def exclude_loopback(environ: Mapping[str, str]) -> dict[str, str]:
    """Return NO_PROXY in both spellings, with this machine besides its own hosts; nothing without a proxy.

    A program that gets them sends requests to this machine directly, whichever HTTP library it uses.
    """
    if not any(_value(environ, name) for name in _PROXY_VARIABLES):
        return {}
    known = [part.strip() for part in _value(environ, _EXCEPTIONS_VARIABLE).split(",")]
    hosts = [part for part in known if part]
    if _EVERY_HOST not in hosts:
        hosts += [host for host in _EXCEPTIONS if host not in hosts]
    return dict.fromkeys((_EXCEPTIONS_VARIABLE, _EXCEPTIONS_VARIABLE.upper()), ",".join(hosts))


def proxy_variable_for(url: str) -> str:
    """Return the variable of this process whose proxy requests to a URL go through; empty if they go directly."""
    # Slow to import, and rarely needed.
    from urllib.request import proxy_bypass

    parts = urlsplit(url)
    variable = _variable(os.environ, f"{parts.scheme}_proxy")
    return "" if proxy_bypass(parts.netloc) else variable


def _value(environ: Mapping[str, str], name: str) -> str:
    variable = _variable(environ, name)
    return environ[variable] if variable else ""


def _variable(environ: Mapping[str, str], name: str) -> str:
    """Return the spelling of a variable that counts: in lowercase letters, else in capitals; empty if it is not set."""
    return next((each for each in (name, name.upper()) if environ.get(each)), "")
