"""Lists of runs in which a chain is one run."""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from cloudtrain.client.chain_view import ChainView
from cloudtrain.errors import CloudtrainError, RunNotFoundError
from cloudtrain.runs.attempt_chain import Chain, read_chains
from cloudtrain.runs.run_filter import RunFilter, submission_time

if TYPE_CHECKING:
    from cloudtrain.backends.base import Backend
    from cloudtrain.runs.status import Status

Listed = tuple["Backend", "Status"]


def list_with_chains(
    backend: Backend, wanted: RunFilter, homes: Sequence[Path]
) -> Iterator[Listed]:
    """Yield the selected runs and chains of a backend, newest first; an attempt of a chain is no run of its own.

    Raises:
        CloudError: The backend cannot be reached.
    """
    chains = [
        (folder, chain)
        for folder, chain in read_chains(homes)
        if chain.backend == backend.name and _has_runs(backend, chain)
    ]
    if not chains:
        yield from ((backend, status) for status in backend.list(wanted))
        return
    attempts = {each.run for _, chain in chains for each in chain.attempts}
    others = ((backend, status) for status in backend.list(wanted) if status.run not in attempts)
    found = _selected(backend, chains, wanted)
    yield from heapq.merge(others, found, key=lambda pair: submission_time(pair[1]), reverse=True)


def _has_runs(backend: Backend, chain: Chain) -> bool:
    return any(backend.may_have(each.run) for each in chain.attempts)


def _selected(
    backend: Backend, chains: Sequence[tuple[Path, Chain]], wanted: RunFilter
) -> Iterator[Listed]:
    """Yield the selected chains, newest first. The status of one is read when it is the next."""
    newest_first = sorted(chains, key=lambda pair: pair[1].attempts[0].started, reverse=True)
    for folder, chain in newest_first:
        if not wanted.accepts_run(chain.id):
            continue
        view = ChainView(backend, folder)
        if wanted.tags and not wanted.accepts_tags(_tags(view, chain)):
            continue
        try:
            status = view.summary()
        except RunNotFoundError:
            # Another account, or its runs were deleted.
            continue
        if wanted.accepts(status):
            yield cast("Backend", view), status


def _tags(view: ChainView, chain: Chain) -> dict[str, str]:
    plan: Any = {}
    with contextlib.suppress(CloudtrainError):
        plan = view.plan_of(chain.id)
    tags = plan.get("job", {}).get("tags")
    return {str(name): str(value) for name, value in (tags or {}).items()}
