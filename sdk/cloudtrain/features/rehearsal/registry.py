"""The checks of a rehearsal that have a module of their own, in the order in which they run after the runs."""

from __future__ import annotations

from cloudtrain.features.rehearsal.base import CheckFunction
from cloudtrain.features.rehearsal.memory import check_memory

CHECKS: tuple[CheckFunction, ...] = (check_memory,)
"""Checks after the reference run."""
