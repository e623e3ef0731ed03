"""Path of a field in a nested document."""

from __future__ import annotations

FieldPath = tuple[str | int, ...]
