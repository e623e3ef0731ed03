"""What RUN means: a run id, the beginning or end of one, a job's name, or `latest`. One resolver for CLI and SDK."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from cloudtrain.backends.base import Backend
from cloudtrain.backends.registry import backend_package
from cloudtrain.errors import CloudError, RunNotFoundError, SettingsError, UserError, did_you_mean
from cloudtrain.runs.known_runs import LATEST, job_name, known_runs, matching_runs
from cloudtrain.runs.run import parse_reference
from cloudtrain.runs.run_filter import RunFilter
from cloudtrain.support.backend_facts import (
    BACKENDS,
    MACHINE_BACKEND,
    backends_without_account,
    facts_of,
)
from cloudtrain.support.run_id import is_run_id

_MOST_ASKED = 500
"""Most runs of an account that are compared with a name that this machine does not know."""
_MOST_LISTED = 10
_ENDED = "the runs of a sandbox end with it, and those of a Slurm site need its settings"
_HELP = "RUN is an id, the beginning or end of one, a job's name or `latest`; see: cloudtrain list"
_NO_ACCOUNT = "for a run on SageMaker set CLOUDTRAIN_REGION (and credentials)"


class RunNames:
    """Finds runs by their names.

    Args:
        homes: Folders of local runs.
        find_backends: Returns the backends of a name that are in use here.
    """

    def __init__(
        self, homes: Iterable[Path], find_backends: Callable[[str], Iterable[Backend]]
    ) -> None:
        self._homes = tuple(homes)
        self._find_backends = find_backends

    def find(self, text: str) -> tuple[Backend, str]:
        """Return the backend that has a run, and the run's id.

        Args:
            text: The name, or `<backend>:` and the name.

        Raises:
            RunNotFoundError: No backend at hand has this run, or several runs have this name.
            UserError: There is no backend of this name.
        """
        named, name = parse_reference(text)
        if named is not None:
            backend_package(named)
        if is_run_id(name) and (exact := self._find_exact(named, name)) is not None:
            return exact
        known = [
            run
            for run in known_runs(os.environ, self._homes)
            if named in (None, run.partition(":")[0])
        ]
        if name == LATEST:
            known = known if named else [run for run in known if _is_without_account(run)]
            found = self._first_existing(known, is_wanted=_is_training)
            if found is None:
                raise _no_latest(
                    named or MACHINE_BACKEND,
                    has_evaluations=self._first_existing(known) is not None,
                )
            return found
        found = self._select(name, known)
        if found is not None:
            return found
        asked, reason = self._ask(named, name)
        found = self._select(name, asked)
        if found is None:
            raise self._not_found(named, name, [*known, *asked], reason)
        return found

    def _find_exact(self, named: str | None, run: str) -> tuple[Backend, str] | None:
        backends = [
            backend for backend in self._opened(named) if named is not None or backend.may_have(run)
        ]
        # Of several folders of local runs, the one that has the run.
        backends = [
            each for each in backends if len(backends) == 1 or each.may_have(run)
        ] or backends
        return (backends[0], run) if backends else None

    def _opened(self, named: str | None) -> Iterator[Backend]:
        for each in BACKENDS if named is None else (named,):
            yield from self._find_backends(each)

    def _first_existing(
        self,
        references: Iterable[str],
        is_wanted: Callable[[Backend, str], bool] = lambda _, __: True,
    ) -> tuple[Backend, str] | None:
        """Return the first wanted run that still exists; those of an ended sandbox and of deleted folders do not."""
        for reference in references:
            backend, run = parse_reference(reference)
            if backend not in BACKENDS:
                continue
            for each in self._find_backends(backend):
                if each.may_have(run) and is_wanted(each, run):
                    return each, run
        return None

    def _select(self, name: str, references: list[str]) -> tuple[Backend, str] | None:
        found, is_first_meant = matching_runs(name, references)
        if is_first_meant:
            return self._first_existing(found)
        existing = [run for run in found if self._first_existing([run]) is not None]
        if len(existing) > 1:
            raise _ambiguous(name, existing)
        return self._first_existing(existing)

    def _ask(self, named: str | None, name: str) -> tuple[list[str], str]:
        """Return the runs of other backends whose ids contain a name, and why some could not be asked."""
        asked: list[str] = []
        reason = ""
        for each in BACKENDS if named is None else (named,):
            # The runs without an account are known.
            if not facts_of(each).uses_account:
                continue
            try:
                for backend in self._find_backends(each):
                    if named is None and not backend.is_configured:
                        reason = _NO_ACCOUNT
                        continue
                    runs = itertools.islice(backend.list(RunFilter(name=name)), _MOST_ASKED)
                    asked += [status.reference for status in runs]
            except (CloudError, SettingsError) as error:
                reason = f"{each} was not asked: {error.message}"
        return asked, reason

    def _not_found(
        self, named: str | None, name: str, known: list[str], reason: str
    ) -> RunNotFoundError:
        if named is not None and is_run_id(name):
            return RunNotFoundError(
                f"no {named} that is known here has a run {name}", f"{_ENDED}; see: cloudtrain list"
            )
        hint = did_you_mean(
            name,
            [*dict.fromkeys(map(job_name, known)), *(run.rpartition(":")[2] for run in known)],
            _HELP,
        )
        if is_run_id(name):
            places = " and ".join(str(home / "runs") for home in self._homes[:3])
            return RunNotFoundError(
                f"there is no local run {name} in {places}", f"{hint}; {_NO_ACCOUNT}"
            )
        hint = f"{hint}; {reason}" if reason else hint
        return RunNotFoundError(f"there is no run {name!r}", hint)


def _is_without_account(reference: str) -> bool:
    return reference.partition(":")[0] in backends_without_account()


def _is_training(backend: Backend, run: str) -> bool:
    """Return whether a run is no evaluation. Only plans of runs that are named as evaluations are read."""
    from cloudtrain.runs.evaluations import EVALUATION_SUFFIX, evaluated_by

    if not job_name(run).endswith(EVALUATION_SUFFIX):
        return True
    try:
        return not evaluated_by(backend.plan_of(run))
    except (CloudError, UserError):
        # The plan is missing.
        return False


def _no_latest(place: str, *, has_evaluations: bool) -> RunNotFoundError:
    if has_evaluations:
        return RunNotFoundError(
            f"there are only evaluations in {place}, which `latest` does not mean", _HELP
        )
    return RunNotFoundError(
        f"there is no {place} run yet",
        "start one: cloudtrain submit --local; or name a run: cloudtrain list",
    )


def _ambiguous(name: str, found: list[str]) -> RunNotFoundError:
    shown = found[:_MOST_LISTED]
    if len(found) > _MOST_LISTED:
        shown.append(f"and {len(found) - _MOST_LISTED} more")
    lines = "\n  ".join(shown)
    return RunNotFoundError(
        f"{name!r} can mean {len(found)} runs, the newest first:\n  {lines}", "give more of the id"
    )
