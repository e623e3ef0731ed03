"""Placeholders such as `$SM_MODEL_DIR` in the words of `code.command`, which each rank replaces by its own values."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

from cloudtrain_runtime.contract.lazy_pattern import lazy_pattern

CHECKPOINTS_VARIABLE: Final = "CLOUDTRAIN_CHECKPOINT_DIR"
"""Variable of a command with the folder that is kept: /opt/ml/checkpoints."""
PLACEHOLDERS: Final = (
    *(
        "SM_MODEL_DIR",
        "SM_OUTPUT_DATA_DIR",
        CHECKPOINTS_VARIABLE,
        "SM_MODULE_DIR",
        "SM_NUM_GPUS",
        "SM_NUM_CPUS",
    ),
    *("SM_HOSTS", "SM_CURRENT_HOST", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
)
"""Names that a command may use, besides those of its channels (`SM_CHANNEL_TRAIN`) and of `code.env`."""

_PLACEHOLDER = lazy_pattern(r"\$(?:\$|(?P<plain>[A-Za-z_]\w*)|\{(?P<braced>[A-Za-z_]\w*)\})")


def names_in(word: str) -> Iterator[str]:
    """Yield the names of the placeholders in a word."""
    yield from (
        name for match in _PLACEHOLDER.finditer(word) if (name := match["plain"] or match["braced"])
    )


def substitute(word: str, values: Mapping[str, str]) -> str:
    """Return a word with values in place of its placeholders; `$$` becomes a dollar sign.

    Raises:
        KeyError: A placeholder has no value.
    """

    def value_of(match: re.Match[str]) -> str:
        name = match["plain"] or match["braced"]
        return "$" if name is None else values[name]

    return _PLACEHOLDER.sub(value_of, word)
