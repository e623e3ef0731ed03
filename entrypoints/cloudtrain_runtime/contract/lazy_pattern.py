"""Regular expressions that are compiled when they are first used.

A command imports some 200 of them and uses a few, and to compile one takes as long as to import a small module.
"""

from __future__ import annotations

import re
from typing import Any, AnyStr, cast


def lazy_pattern(text: AnyStr, flags: int = 0) -> re.Pattern[AnyStr]:
    """Return what `re.compile` returns, but compile at the first use."""
    return cast("re.Pattern[AnyStr]", _LazyPattern(text, flags))


class _LazyPattern:
    """Has the methods of a pattern from its first use on.

    Attributes:
        pattern: The text of the regular expression.
    """

    def __init__(self, text: str | bytes, flags: int) -> None:
        self.pattern = text
        self._flags = flags

    def __getattr__(self, name: str) -> Any:
        # Called only for attributes that are not set, so each method is looked up once.
        if name.startswith("_"):
            raise AttributeError(name)
        method = getattr(re.compile(self.pattern, self._flags), name)
        setattr(self, name, method)
        return method
