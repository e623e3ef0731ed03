"""The name of the file with a run's plan, in a module of its own: what only reads the file needs no planner."""

from __future__ import annotations

from typing import Final

PLAN_FILE: Final = "plan.json"
"""Name of the file beside the folder of run.json that holds the plan of a run."""
