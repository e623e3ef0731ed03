"""Functions and Tasks of a notebook: their module, whose tracebacks name cells, and the call of a function."""

from __future__ import annotations

from cloudtrain_runtime.functions.call import run_function as run_function
from cloudtrain_runtime.functions.call import with_state as with_state
from cloudtrain_runtime.functions.cells import name_cells as name_cells
