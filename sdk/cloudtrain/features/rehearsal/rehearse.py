"""`rehearse`: run a job on this machine, interrupt it, and keep a receipt."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import secrets
import tempfile
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path

from cloudtrain.backends.container.machine import visible_gpus
from cloudtrain.bundle import BUNDLES_FOLDER
from cloudtrain.bundle.archive import write_bundle
from cloudtrain.client.client import Client, client_of
from cloudtrain.client.observer import Observer
from cloudtrain.client.planning_inputs import Job, check_job, plan_job, read_job
from cloudtrain.client.receipts import (
    RECEIPT_FILE,
    Receipt,
    ReceiptKey,
    choose_receipt,
    read_receipt,
    receipt_path,
    write_receipt,
)
from cloudtrain.client.session import Session
from cloudtrain.errors import UserError
from cloudtrain.features.rehearsal.data_sample import parse_sample, sample_channels
from cloudtrain.features.rehearsal.engine import Engine, RehearsedJob
from cloudtrain.features.rehearsal.report import Rehearsal
from cloudtrain.features.rehearsal.runs import RehearsalRunner
from cloudtrain.features.rehearsal.shape import choose_shape
from cloudtrain.features.rehearsal.shared_imports import SharedImports
from cloudtrain.features.rehearsal.workspace import Workspace, interrupting_on_signals
from cloudtrain.planning.plan import Plan
from cloudtrain.settings.settings import Settings
from cloudtrain.support.backend_facts import (
    DEFAULT_BACKEND,
    MACHINE_BACKEND,
    choose_backend,
    facts_of,
    place_name,
)
from cloudtrain.support.checks import PROOF_WORDS, Check, Result, unknown
from cloudtrain.support.renamed import renamed_arguments
from cloudtrain_runtime.contract import usable_cpus

_SEEDS = 1_000_000
LEAST_MINUTES = 0.1
MOST_MINUTES = 10_080.0
"""Shortest and longest time of a rehearsal; the longest is a week."""
_NO_CUDA = "the CUDA devices of these runs were the CPU, and NCCL was Gloo: nothing ran on a GPU"


@dataclasses.dataclass(frozen=True)
class RehearsalOptions:
    """What a rehearsal is asked for.

    Attributes:
        minutes: Longest time in minutes, from 0.1 to 10,080.
        seed: Seed of the steps at which runs are interrupted, from 0 on; by default a random one.
        keep: Keep the rehearsed runs, which are deleted at the end unless a check failed.
        beside: Write the receipt beside the job file, too.
        sample: How much of each channel in S3 is read: a number of objects such as `64`, or a size such as `200MB`.
        cuda_on_cpu: Give local runs on a machine without GPUs a stand-in for CUDA.
    """

    minutes: float = 10.0
    seed: int | None = None
    keep: bool = False
    beside: bool = False
    sample: str = "64"
    cuda_on_cpu: bool = False

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            UserError: One of them is out of its range.
        """
        minutes: object = self.minutes
        seed: object = self.seed
        # Written so that NaN is refused, too.
        if not isinstance(minutes, int | float) or not LEAST_MINUTES <= minutes <= MOST_MINUTES:
            message = f"minutes: expected a number from {LEAST_MINUTES} to {MOST_MINUTES:.0f}, got {minutes!r}"
            raise UserError(message, "the default is 10")
        if seed is not None and (not isinstance(seed, int) or seed < 0):
            raise UserError(
                f"seed: expected an integer from 0 on, got {seed!r}",
                "leave it out for a random one",
            )
        try:
            parse_sample(str(self.sample))
        except ValueError as error:
            raise UserError(f"sample: {error}", "the default is 64 objects") from None


def make_receipt(
    plan: Plan, checks: Iterable[Check], verdict: str, *, backend: str, seed: int
) -> Receipt:
    """Return the receipt of a rehearsal of a plan."""
    worst: dict[str, str] = {}
    order = list(PROOF_WORDS.values())
    for check in checks:
        word = PROOF_WORDS[check.result]
        worst[check.name] = max(worst.get(check.name, order[0]), word, key=order.index)
    key = ReceiptKey.of(plan)
    return Receipt(
        version=1,
        digest=key.digest,
        bundle=key.bundle,
        request=key.request,
        verdict=verdict,
        checks=worst,
        instances=plan.cluster.instances,
        date=datetime.now(UTC).replace(microsecond=0),
        cloudtrain=importlib.metadata.version("cloudtrain"),
        backend=backend,
        seed=seed,
    )


def check_beside(folder: Path) -> None:
    """Check, before a rehearsal, that its receipt can be written beside the job file.

    Raises:
        UserError: The folder cannot be written, or has a file of this name that is no receipt.
    """
    path = folder / RECEIPT_FILE
    try:
        read_receipt(path)
    except ValueError as error:
        raise UserError(
            f"{error}, and --save would replace it", "move it, or leave out --save"
        ) from None
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        message = f"--save: {path} cannot be written: {error.strerror}"
        raise UserError(
            message, "leave out --save, or make the folder of the job file writable"
        ) from None


def keep_receipt(receipt: Receipt, home: Path, beside: Path | None) -> tuple[str, ...]:
    """Write a receipt into the folder of local runs, and beside the job file if wanted; return warnings.

    A receipt that shows nothing does not replace a proven or failed one of the same code and request.
    """
    inside = receipt_path(home, receipt.digest)
    warnings = []
    paths = [inside]
    if beside is not None:
        paths.append(beside / RECEIPT_FILE)
    found = []
    for path in paths:
        # Damaged: it is replaced.
        with contextlib.suppress(ValueError):
            found.append(read_receipt(path))
    known = [each for each in found if each is not None and each.digest == receipt.digest]
    kept = choose_receipt([receipt, *known]) or receipt
    if kept is not receipt:
        warnings.append(f"the receipt stays as it was: {kept.sentence}")
    for path in paths:
        try:
            write_receipt(path, kept)
        except OSError as error:
            warnings.append(
                f"the receipt is not in {path}, which cannot be written: {error.strerror}"
            )
    return tuple(warnings)


@renamed_arguments(spec="job")
def rehearse(
    job: Job,
    *,
    minutes: float = 10.0,
    backend: str | None = None,
    local: bool = False,
    sandbox: bool = False,
    seed: int | None = None,
    keep: bool = False,
    sample: str = "64",
    cuda_on_cpu: bool = False,
    settings: Settings | None = None,
    observer: Observer | None = None,
    client: Client | None = None,
) -> Rehearsal:
    """Run a job here for a few steps, interrupt it, resume it, and return what is proven.

    Its processes and files are gone at the end. The receipt is kept: `plan` and `submit` show it.

    Args:
        job: The job, as it is to be submitted.
        minutes: Longest time in minutes, from 0.1 to 10,080.
        backend: Where its runs take place, on this machine: `local` by default, or `sandbox`, where a run has all
            states of a training job.
        local: The same as `backend="local"`.
        sandbox: The same as `backend="sandbox"`.
        seed: Seed of the steps at which runs are interrupted, from 0 on; by default a random one.
        keep: Keep the rehearsed runs, which are deleted at the end unless a check failed.
        sample: How much of each channel in S3 is read: a number of objects such as `64`, or a size such as `200MB`.
        cuda_on_cpu: Give local runs on a machine without GPUs a stand-in for CUDA.
        settings: The account; by default from environment and files.
        observer: Receives what is done (`on_progress`, `on_detail`) and each check when it is known (`on_check`).
        client: The client whose settings, observer and folder of local runs are used, in place of these.

    Raises:
        SpecError, BundleError, MissingExtraError: The input is wrong; nothing was started.
        UserError: An option is out of its range, or the disk is full.
    """
    return rehearse_job(
        client_of(client, settings, observer),
        job,
        RehearsalOptions(
            minutes=minutes,
            seed=seed,
            keep=keep,
            sample=sample,
            cuda_on_cpu=cuda_on_cpu,
        ),
        backend=choose_backend(backend, local=local, sandbox=sandbox, default=MACHINE_BACKEND),
    )


def rehearse_job(
    client: Client,
    job: Job,
    options: RehearsalOptions | None = None,
    *,
    backend: str = MACHINE_BACKEND,
) -> Rehearsal:
    """Rehearse a job with options; see `rehearse`.

    Args:
        client: The client whose settings, observer and folder of local runs are used.
        job: The job, as it is to be submitted.
        options: Limits of the rehearsal.
        backend: Where its runs take place.

    Raises:
        SpecError, BundleError, MissingExtraError: The input is wrong; nothing was started.
        UserError: An option is out of its range, the disk is full, the receipt cannot be beside the job file, or the
            backend is not on this machine.
    """
    if not facts_of(backend).is_on_this_machine:
        raise UserError(
            f"a rehearsal takes place on this machine, not {place_name(backend)}",
            "leave the backend out, or use sandbox",
        )
    options = options or RehearsalOptions()
    session = client.session
    loaded = read_job(job)
    inputs = session.offline_inputs(loaded, DEFAULT_BACKEND)
    plan, contents = plan_job(loaded, inputs)
    spec = check_job(loaded, inputs)
    home = session.find_home()
    if options.beside:
        check_beside(spec.base)
    seed = options.seed
    if seed is None:
        seed = secrets.randbelow(_SEEDS)
    shape = choose_shape(spec, plan, cpus=usable_cpus(), gpus=len(visible_gpus()))
    with (
        interrupting_on_signals(),
        Workspace(home, keep=options.keep) as workspace,
        SharedImports(workspace.folder) as imports,
    ):
        seconds = 60 * options.minutes
        deadline = time.monotonic() + seconds
        own = Session(session.settings, home=workspace.home)
        opened = own.open(backend, loaded, cuda_on_cpu=options.cuda_on_cpu)
        runner = RehearsalRunner(
            backend=opened,
            inputs=lambda: own.inputs(opened.target(), opened),
            code=plan.bundle,
            bundle=write_bundle(
                contents, workspace.home / BUNDLES_FOLDER, progress=session.observer.on_read
            ),
        )
        sample = parse_sample(str(options.sample))
        here, sampled = sample_channels(spec, sample, workspace.folder, deadline)
        places = {name: channel.local_path for name, channel in here.data.items()}
        channels = {name: here.base / path for name, path in places.items() if path is not None}
        rehearsed = RehearsedJob(
            spec=spec,
            plan=plan,
            here=here,
            archive=runner.bundle.path,
            shape=shape,
            channels=channels,
        )
        engine = Engine(
            workspace=workspace,
            job=rehearsed,
            runner=runner,
            seconds=seconds,
            seed=seed,
            steps=session.observer,
            imports=imports.place,
        )
        others = []
        if options.cuda_on_cpu:
            others.append(unknown("cuda", _NO_CUDA))
        made: list[Check] = []
        for check in chain(sampled, engine.checks(), others):
            made.append(check)
            session.observer.on_check(check, engine.driver.seconds_left)
        checks = tuple(made)
        workspace.keep = options.keep or any(check.result is Result.FAIL for check in checks)
    found = Rehearsal(checks, folder=workspace.folder if workspace.keep else None)
    receipt = make_receipt(plan, checks, PROOF_WORDS[found.verdict], backend=backend, seed=seed)
    warnings = keep_receipt(receipt, home, spec.base if options.beside else None)
    return dataclasses.replace(found, receipt=receipt, warnings=warnings)
