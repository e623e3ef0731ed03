"""Chains: begin one with a job or with a run that exists, control it, and stop it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cloudtrain.client.client import Client
from cloudtrain.client.home import make_home
from cloudtrain.controllers.kept_code import KeptCode, read_code
from cloudtrain.controllers.process import start_controller
from cloudtrain.controllers.reserved_runs import ReservedRuns
from cloudtrain.controllers.shared_folder import LostError
from cloudtrain.errors import CloudtrainError, NoCapacityError, UnreachableError, UserError
from cloudtrain.features.recovery.causes import find_cause
from cloudtrain.features.recovery.controller import Controller
from cloudtrain.features.recovery.shared_chain import adopt, find_copy
from cloudtrain.features.recovery.stored_chain import StoredChain
from cloudtrain.job.document import Document
from cloudtrain.job.sections.recover import Recover
from cloudtrain.job.spec import JobSpec, check_document
from cloudtrain.planning.plan import Plan
from cloudtrain.runs.attempt_chain import (
    AttemptState,
    Chain,
    ChainAttempt,
    find_chain_of_attempt,
)
from cloudtrain.runs.previous_run import PreviousRun
from cloudtrain.runs.run import Run
from cloudtrain.runs.status import State, Status
from cloudtrain.settings.settings import Settings
from cloudtrain.support.atomic_write import write_atomically
from cloudtrain.support.backend_facts import facts_of
from cloudtrain.support.regular_files import read_regular
from cloudtrain_runtime.contract.json_checks import ObjectSchema, json_object, text
from cloudtrain_runtime.contract.strict_json import dump_json, load_json

_JOB_FILE = "job.json"
_JOB = ObjectSchema({"job": json_object, "base": text, "digest": text})
MODULE = "cloudtrain.features.recovery"
_ACCOUNT_SETTINGS = (
    "role",
    "bucket",
    "prefix",
    "region",
    "subnets",
    "security_groups",
    "kms_key",
    "transport",
)


@dataclass(frozen=True)
class StoredJob:
    """The job of a chain, for a first attempt that does not exist yet.

    Attributes:
        spec: The job.
        digest: Digest of its code.
    """

    spec: JobSpec
    digest: str

    @classmethod
    def read(cls, folder: Path) -> StoredJob:
        """Return what the folder of a chain has.

        Raises:
            UnreachableError: This machine has no job of the chain.
            UserError: It is damaged.
        """
        file = folder / _JOB_FILE
        try:
            content = _JOB(load_json(read_regular(file)))
        except OSError:
            # The chain waits for the machine that has the job.
            raise UnreachableError(
                f"{folder.name} has no run yet, and its job is not on this machine",
                "continue on the machine that has submitted it",
            ) from None
        except ValueError as error:
            raise UserError(f"{file}: this is not the job of a chain: {error}") from None
        document = Document(f"the job of {folder.name}", content["job"])
        loaded = check_document(document, Path(content["base"]), has_files=False)
        return cls(loaded.valid_spec(), content["digest"])

    def write(self, folder: Path) -> None:
        """Write it into the folder of a chain."""
        content = {
            "job": self.spec.to_document(),
            "base": str(self.spec.base),
            "digest": self.digest,
        }
        write_atomically(folder / _JOB_FILE, dump_json(content, indent=1, default=str) + "\n")


def begin_with_job(
    client: Client, spec: JobSpec, backend: str, plan: Plan | None = None
) -> StoredChain:
    """Record a chain whose first attempt is not submitted yet.

    Args:
        client: The client.
        spec: The job.
        backend: Where it runs.
        plan: Its plan; by default it is made here.

    Raises:
        CloudtrainError: The job is not valid.
    """
    home = client.session.home or make_home()
    code = read_code(spec, home)
    plan = plan or client.planner(spec, backend=backend)(spec)
    limits = spec.limits.recover or Recover()
    # A plan whose estimate is above limits.recover.cost, or unknown beside it, has an error.
    reservation = plan.cost.max_usd or 0.0
    attempt = ChainAttempt(plan.run, reservation_usd=reservation, started=time.time())
    chain = Chain(
        id=plan.run,
        backend=backend,
        job=spec.name,
        runtime_seconds=plan.max_runtime_seconds,
        created=time.time(),
        limits=limits,
        reservation_usd=reservation,
        usd_per_hour=plan.cost.usd_per_hour or 0.0,
        attempts=(attempt,),
        identity=plan.identity,
    )
    stored = StoredChain.create(home, chain)
    StoredJob(spec, code.info.digest).write(stored.folder)
    KeptCode(stored, spec, code.info.digest).keep(code)
    return stored


def wait_for_capacity(client: Client, spec: JobSpec, plan: Plan, error: NoCapacityError) -> str:
    """Let a controller in the background submit a job for which there was no capacity; return the chain's reference.

    Args:
        client: The client.
        spec: The job.
        plan: The plan that was sent.
        error: Why no run was started.

    Raises:
        NoCapacityError: The job recovers from other causes only.
        UserError: Its limits do not allow one attempt.
    """
    limits = spec.limits.recover or Recover()
    if "capacity" not in limits.on:
        raise error
    stored = begin_with_job(client, spec, plan.target, plan)
    # Until the controller has tried, this is why the run waits.
    stored.write_pause(error.message)
    start(stored, client)
    reference = f"{plan.target}:{stored.id}"
    client.session.record(client.get_run(reference))
    return reference


def begin_with_run(client: Client, run: Run, limits: Recover | None = None) -> StoredChain:
    """Record a chain whose first attempt is a run that exists.

    Args:
        client: The client.
        run: The run.
        limits: How it continues; by default as its job says.

    Raises:
        UserError: The run has succeeded or failed in a way that comes again, or it has no price for a limited budget.
    """
    status = run.status()
    plan = run.plan_document()
    spec = PreviousRun(plan).job()
    limits = limits or spec.limits.recover or Recover()
    _refuse_ended(client, run, status, limits)
    highest = plan.get("cost", {}).get("max_usd")
    if highest is None and limits.cost is not None:
        raise UserError(
            f"no price is known for {run.reference}, so limits.recover.cost could not hold",
            "leave it out",
        )
    created = status.created or datetime.now(UTC)
    attempt = ChainAttempt(
        run.id,
        AttemptState.RUNNING,
        reservation_usd=highest or 0.0,
        started=created.timestamp(),
    )
    chain = Chain(
        id=run.id,
        backend=run.backend,
        job=spec.name,
        runtime_seconds=plan["max_runtime_seconds"],
        created=time.time(),
        limits=limits,
        reservation_usd=highest or 0.0,
        usd_per_hour=plan.get("cost", {}).get("usd_per_hour") or 0.0,
        attempts=(attempt,),
        identity=str(plan.get("identity", "")),
    )
    return StoredChain.create(client.session.home or make_home(), chain)


def _refuse_ended(client: Client, run: Run, status: Status, limits: Recover) -> None:
    """Refuse a run that has ended for a cause that another attempt does not help against.

    Raises:
        UserError: It is one.
    """
    if not status.state.is_final:
        return
    if status.state is State.SUCCEEDED:
        raise UserError(
            f"{run.reference} has succeeded, so nothing is left to train",
            f"to train longer: cloudtrain resume {run.id} --set train.epochs=N, or train.steps=N",
        )
    explained = client.explain(run)
    cause = find_cause(status, explained)
    if cause is None:
        kind = "" if explained.failure is None else f"{explained.failure.words}: "
        resume = f"fix the cause, then continue it: cloudtrain resume {run.id}"
        raise UserError(
            f"{run.reference} has ended, and another attempt would not help: {kind}{explained.message}",
            explained.action or resume,
        )
    if cause not in limits.on:
        raise UserError(
            f"{run.reference} has ended ({explained.message}), and limits.recover.on does not have {cause}",
            f"add it: --on {cause}; or continue it once: cloudtrain resume {run.id}",
        )


def continue_run(client: Client, run: Run, **given: Any) -> Recover:
    """Let a run continue by itself: begin its chain, or start the controller of its chain again.

    Args:
        client: The client.
        run: The run, or the first one of a chain.
        given: Fields of `limits.recover` that replace those of its job.

    Returns:
        Its limits.

    Raises:
        SpecError: A field is not valid.
        UserError: Its queue does so already, it has ended in a way that comes again, or its chain has other limits.
    """
    if facts_of(run.backend).has_sites:
        raise UserError(
            f"{run.reference} needs no recovery: Slurm queues it again after an interruption",
            f"see: cloudtrain status {run.reference}",
        )
    Recover(**given)
    stored = StoredChain.find(run.id, client.session.home)
    if stored is None:
        _refuse_later_attempt(client, run)
        stored = adopt(client, run.id, run.backend)
    if stored is None:
        spec = PreviousRun(run.plan_document()).job()
        before = spec.limits.recover or Recover()
        stored = begin_with_run(client, run, Recover(**{**before.model_dump(mode="json"), **given}))
    else:
        _refuse_ended_chain(client, run, stored.read())
        if given:
            raise UserError(
                f"{run.reference} is continued by itself already, within the limits of its start",
                f"to end that: cloudtrain stop {run.reference}",
            )
    start(stored, client)
    return stored.read().limits


def _refuse_later_attempt(client: Client, run: Run) -> None:
    """Refuse a later attempt of a chain, and name the chain: of a chain of its own, it would be in two.

    Raises:
        UserError: It is one.
    """
    chain = find_chain_of_attempt(run.id, client.session.context().homes)
    if chain is not None:
        raise UserError(
            f"{run.reference} is a later attempt of {chain.id}, whose name all commands take",
            f"cloudtrain recover {chain.id}",
        )


def _refuse_ended_chain(client: Client, run: Run, chain: Chain) -> None:
    """Refuse a chain that has ended; say why it has, and what to do.

    Raises:
        UserError: It has ended.
    """
    if chain.state is None:
        return
    attempts = "1 attempt" if len(chain.attempts) == 1 else f"{len(chain.attempts)} attempts"
    if chain.state is State.SUCCEEDED:
        raise UserError(
            f"{run.reference} has succeeded after {attempts}, so nothing is left to train",
            f"to train longer: cloudtrain resume {run.id} --set train.epochs=N, or train.steps=N",
        )
    action = f"to begin again at its checkpoint: cloudtrain resume {run.id}, then cloudtrain recover RUN with the new id"
    if chain.newest.state is AttemptState.ENDED and not chain.newest.cause:
        with contextlib.suppress(CloudtrainError):
            action = client.explain(run).action or action
    reason = f" ({chain.reason})" if chain.reason else ""
    raise UserError(
        f"{run.reference} is {chain.state} after {attempts}{reason}, and is not continued any more",
        action,
    )


def start(stored: StoredChain, client: Client | None = None) -> None:
    """Start the controller of a chain in the background, unless one runs.

    Args:
        stored: The chain.
        client: The client whose account the controller uses; by default that of environment and files.

    Raises:
        UserError: It ended at once.
    """
    if stored.is_controlled:
        return
    settings = None if client is None else client.session.settings
    start_controller(stored, MODULE, {} if settings is None else environ_of(settings))


def environ_of(settings: Settings) -> dict[str, str]:
    """Return the variables that give another process the settings of an account."""
    found = {}
    for name in _ACCOUNT_SETTINGS:
        value = getattr(settings, name)
        if value and value != getattr(Settings(), name):
            text = value if isinstance(value, str) else ",".join(value)
            found[f"CLOUDTRAIN_{name.upper()}"] = text
    return found


def control(
    stored: StoredChain,
    *,
    report: Callable[[str], None],
    settings: Settings | None = None,
) -> None:
    """Control a chain in this process until it has ended. If another process does so, do nothing."""
    with open_controller(stored, report=report, settings=settings) as controller:
        if controller is not None:
            controller.run()


@contextlib.contextmanager
def open_controller(
    stored: StoredChain,
    *,
    report: Callable[[str], None],
    settings: Settings | None = None,
) -> Iterator[Controller | None]:
    """Hold the locks of a chain, and yield its controller.

    It is None if another process of this machine controls the chain, or if the chain has ended.

    Raises:
        UserError: Another machine controls it.
    """
    with contextlib.ExitStack() as stack:
        if not stack.enter_context(stored.lock()):
            yield None
            return
        chain = stored.read()
        reserved = ReservedRuns(stored, chain.backend, None, settings)
        copy = find_copy(stored, chain.backend, reserved.client())
        if copy is not None:
            stack.enter_context(copy.lock(stored.stop_file))
            copy.fetch_state(stored.file)
            if stored.read().state is not None:
                yield None
                return
            copy.store_state(stored.file)

        def begin(run: str) -> Run:
            job = StoredJob.read(stored.folder)
            code = KeptCode(stored, job.spec, job.digest).read()
            client = ReservedRuns(stored, chain.backend, code, settings).client(run)
            return client.submit(job.spec, backend=chain.backend, skip_check=True, recover=False)

        try:
            yield Controller(
                stored,
                reserved,
                begin=begin,
                report=report,
                on_save=lambda: None if copy is None else copy.store_state(stored.file),
            )
        except LostError:
            # What this process has recorded last did not happen.
            if copy is not None:
                copy.fetch_state(stored.file)
            raise
