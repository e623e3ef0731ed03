"""Names of the environment variables that users set, and what a misspelt one means."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from cloudtrain.errors import nearest

PREFIX = "CLOUDTRAIN_"
NAMES = (
    "BUCKET",
    "HOME",
    "KMS_KEY",
    "LOG_EVERY_STEPS",
    "ML_NAMESPACE",
    "MOST_PROCESSES",
    "PASS_ENVIRONMENT",
    "PREFIX",
    "PROFILE",
    "REGION",
    "REPORT",
    "ROLE",
    "SECURITY_GROUPS",
    "SITE",
    "STOP_GRACE_SECONDS",
    "SUBNETS",
    "TRANSPORT",
    "WORKER_START",
)
_CLOSE = 0.8
"""Similarity of a misspelt name: REGIN has 0.91 of REGION. Runs and tests have variables that are less similar."""


def misspelt_variables(environ: Iterable[str]) -> Iterator[str]:
    """Yield a warning for each variable whose name is nearly that of one that is read."""
    for variable in environ:
        name = variable.removeprefix(PREFIX)
        if name == variable or name in NAMES:
            continue
        near = nearest(name, NAMES, cutoff=_CLOSE)
        if near is not None:
            yield f'{variable} is not read; did you mean "{PREFIX}{near}"?'
