"""The fork server from which tests start ranks: it imports torch once, and each rank is a fork of it."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext


def fork_server(*modules: str) -> ForkServerContext:
    """Return the context whose processes are forked after the import of torch and of these modules."""
    context = multiprocessing.get_context("forkserver")
    # The last one freezes what the others have imported.
    context.set_forkserver_preload(["torch", "torch._dynamo", *modules, "support.frozen_imports"])
    return context
