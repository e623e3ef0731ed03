"""Jobs from functions and Task classes, without files: their source travels from a notebook's cells or a script."""

from __future__ import annotations
