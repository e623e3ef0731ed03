"""The backends by name: what is known about each without opening it.

A new backend is a package with the functions of `backends.registry.BackendPackage`, and an entry here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cloudtrain.errors import UserError, did_you_mean
from cloudtrain.support.one_or_more import one_or_more


@dataclass(frozen=True)
class BackendFacts:
    """What is known about a backend.

    Attributes:
        name: Its name, which begins the references of its runs.
        package: Its package.
        option: Option of commands that selects it; empty for the backend that is used without an option.
        uses_account: Whether AWS's API runs its jobs, in containers and with files in S3: that of an account, or that
            of the sandbox.
        is_on_this_machine: Whether the processes of its runs are on this machine.
        is_billed: Whether its runs cost money.
        has_sites: Whether the settings describe several places where its runs can be, of which `--site` names one.
    """

    name: str
    package: str
    option: str
    uses_account: bool
    is_on_this_machine: bool
    is_billed: bool
    has_sites: bool = False

    @property
    def is_local(self) -> bool:
        """Whether its runs use this machine and its own Python."""
        return self.is_on_this_machine and not self.uses_account

    @property
    def is_simulated(self) -> bool:
        """Whether its account is simulated, so that its costs are what the account would bill."""
        return self.uses_account and not self.is_billed


DEFAULT_BACKEND = "sagemaker"
"""The backend of a command or call that names none."""

MACHINE_BACKEND = "local"
"""The backend that runs jobs with this machine's own Python. Rehearsals use it by default."""

SLURM_BACKEND = "slurm"
"""The backend that runs jobs on the nodes of a Slurm cluster, with the Python there."""

SIMULATED_BACKEND = "sandbox"
"""The backend that simulates the account of the default backend."""

BACKENDS: dict[str, BackendFacts] = {
    each.name: each
    for each in (
        BackendFacts(
            name=MACHINE_BACKEND,
            package="cloudtrain.backends.local",
            option="--local",
            uses_account=False,
            is_on_this_machine=True,
            is_billed=False,
        ),
        BackendFacts(
            name=SLURM_BACKEND,
            package="cloudtrain.backends.slurm",
            option="--backend slurm",
            uses_account=False,
            is_on_this_machine=False,
            is_billed=False,
            has_sites=True,
        ),
        BackendFacts(
            name=SIMULATED_BACKEND,
            package="cloudtrain.backends.sandbox",
            option="--sandbox",
            uses_account=True,
            is_on_this_machine=True,
            is_billed=False,
        ),
        BackendFacts(
            name=DEFAULT_BACKEND,
            package="cloudtrain.backends.sagemaker",
            option="",
            uses_account=True,
            is_on_this_machine=False,
            is_billed=True,
        ),
    )
}
"""Every backend, in the order in which a run without a backend's name is looked up."""


def facts_of(name: str) -> BackendFacts:
    """Return what is known about a backend.

    Raises:
        UserError: There is no backend of this name.
    """
    if name not in BACKENDS:
        raise UserError(f"there is no backend {name!r}", did_you_mean(name, list(BACKENDS)))
    return BACKENDS[name]


def place_name(name: str) -> str:
    """Return where the runs of a backend take place, as part of a sentence: `on this machine`."""
    known = facts_of(name)
    if known.is_simulated:
        return "in the sandbox"
    if known.is_on_this_machine:
        return "on this machine"
    return "on SageMaker" if known.uses_account else f"on {known.name.capitalize()}"


def backends_without_account() -> tuple[str, ...]:
    """Return the backends whose runs are files that this machine can read, without an account."""
    return tuple(name for name, each in BACKENDS.items() if not each.uses_account)


PLACE_ARGUMENTS = ("backend", MACHINE_BACKEND, SIMULATED_BACKEND, "site", "settings")
"""Arguments of calls that say where a job runs."""


def choose_backend(
    backend: str | None = None,
    *,
    local: bool = False,
    sandbox: bool = False,
    default: str = DEFAULT_BACKEND,
) -> str:
    """Return the backend that a call names, or that its shorthands `local` and `sandbox` mean.

    Raises:
        UserError: There is no such backend, or two are named.
    """
    shorthands = {MACHINE_BACKEND: local, SIMULATED_BACKEND: sandbox}
    named = [] if backend is None else [facts_of(backend).name]
    named += [name for name, is_given in shorthands.items() if is_given]
    given = list(dict.fromkeys(named))
    if len(given) > 1:
        raise UserError(
            f"a run is in one backend, not in {' and '.join(given)}",
            "give one of backend=, local=True and sandbox=True",
        )
    return facts_of(given[0] if given else default).name


def choose_backends(backend: str | Iterable[str] | None) -> tuple[str, ...] | None:
    """Return the backends that a call names, one or several; None where it names none.

    Raises:
        UserError: There is no such backend.
    """
    if backend is None:
        return None
    return tuple(facts_of(each).name for each in one_or_more(backend))


def refuse_site(backend: str, site: str | None) -> None:
    """Refuse a site for a backend that has none.

    Raises:
        UserError: The backend has no sites.
    """
    if site is not None and not facts_of(backend).has_sites:
        sites = next(each for each in BACKENDS.values() if each.has_sites)
        raise UserError(
            f"{backend} has no sites, and {site!r} was given",
            f"leave it out, or add {sites.option}, in Python backend={sites.name!r}",
        )


def backend_option(name: str) -> str:
    """Return the option of commands for a backend, after a space; an empty text for the default backend."""
    option = facts_of(name).option
    return f" {option}" if option else ""
