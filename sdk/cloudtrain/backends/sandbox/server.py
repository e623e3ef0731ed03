"""Server process of the sandbox: creates the account, serves until a signal, and ends all processes of its jobs."""

from __future__ import annotations

import functools
import logging
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cloudtrain.aws.retry import client_retries
from cloudtrain.aws.session import NO_SHARED_FILES, make_isolated_session
from cloudtrain.backends.sandbox.fault_injection import FaultInjector, FaultPlan
from cloudtrain.backends.sandbox.file_systems import FOLDER as FILE_SYSTEMS
from cloudtrain.backends.sandbox.own_folders import delete_claimed
from cloudtrain.backends.sandbox.process import (
    ACCOUNT,
    REGION,
    STATE_FILE,
    Sandbox,
    lock_home,
    require_packages,
    write_state,
)
from cloudtrain.errors import UserError
from cloudtrain.support.proxies import exclude_loopback
from cloudtrain_runtime.contract import STOP_GRACE_SECONDS
from cloudtrain_runtime.contract.strict_json import dump_json

BUCKET = "cloudtrain-sandbox"
ROLE = "cloudtrain-sandbox"
_JOBS_FOLDER = "jobs"
_ENDPOINTS_FOLDER = "endpoints"
_KILL_ROUNDS = 2
_SCHEDULE_SECONDS = 0.1
_TRUST = {
    "Version": "2012-10-17",
    "Statement": [
        {
            "Effect": "Allow",
            "Principal": {"Service": "sagemaker.amazonaws.com"},
            "Action": "sts:AssumeRole",
        }
    ],
}
_PERMISSIONS = {
    "Version": "2012-10-17",
    "Statement": [
        {"Effect": "Allow", "Action": [f"{service}:*"], "Resource": "*"}
        for service in ("s3", "logs", "cloudwatch", "ecr", "sagemaker")
    ],
}


@dataclass(frozen=True)
class ServerOptions:
    """Options of a sandbox.

    Attributes:
        home: Folder of its state file and of the jobs' files.
        port: Port on loopback; 0 selects a free port.
        max_processes: Most ranks per instance, regardless of the GPUs of its type.
        stop_grace_seconds: Time between SIGTERM and SIGKILL.
        fault_plan: Faults to inject.
    """

    home: Path
    port: int = 0
    max_processes: int = 2
    stop_grace_seconds: float = STOP_GRACE_SECONDS
    fault_plan: FaultPlan = field(default_factory=FaultPlan)


def serve(options: ServerOptions, on_ready: Callable[[Sandbox], None]) -> None:
    """Serve until SIGINT or SIGTERM; then end all processes of all jobs.

    Args:
        options: Options of the sandbox.
        on_ready: Called with the sandbox once it accepts requests.

    Raises:
        MissingExtraError: moto, flask, psutil or torch is not installed.
        UserError: The port is in use, or another sandbox uses the folder.
    """
    require_packages()
    # The lock is held until this process ends.
    _lock = lock_home(options.home)
    from cloudtrain.backends.container.process_tree import adopt_orphans, descendants, kill

    for name in (_JOBS_FOLDER, _ENDPOINTS_FOLDER):
        delete_claimed(options.home / name)
    adopt_orphans()
    is_signalled = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: is_signalled.set())
    is_ending = threading.Event()
    server, sandbox = _start(options, is_ending)
    try:
        # The file stays locked until this process ends.
        _state = write_state(options.home, sandbox)
        on_ready(sandbox)
        # Some platforms do not interrupt a wait without a timeout.
        while not is_signalled.wait(1.0):
            continue
    finally:
        (options.home / STATE_FILE).unlink(missing_ok=True)
        server.shutdown()
        server.server_close()
        is_ending.set()
        # The second round reaches processes that were starting during the first.
        for _ in range(_KILL_ROUNDS):
            kill(descendants())
    # Exit without joining the threads of jobs, which may still wait for killed processes.
    os._exit(0)


def _start(options: ServerOptions, is_ending: threading.Event) -> tuple[Any, Sandbox]:
    """Start the server in a thread, then create the account through its API."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        # The user's AWS settings must not reach moto or a container.
        del os.environ[name]
    os.environ.update({**NO_SHARED_FILES, **exclude_loopback(os.environ)})
    from botocore.config import Config
    from moto.moto_server.werkzeug_app import (
        DomainDispatcherApplication,
        MotoRequestHandler,
        create_backend_app,
    )
    from werkzeug.serving import make_server

    from cloudtrain.backends.sandbox.access import AccessControl, make_access_key
    from cloudtrain.backends.sandbox.batch_queues import ServiceJobs
    from cloudtrain.backends.sandbox.endpoint_operations import Endpoints
    from cloudtrain.backends.sandbox.http_frontend import USER_AGENT, HttpFrontend
    from cloudtrain.backends.sandbox.job_runner import JobRunner, RunnerEnvironment
    from cloudtrain.backends.sandbox.resources import tag_operations
    from cloudtrain.backends.sandbox.training_job_operations import TrainingJobs
    from cloudtrain.backends.sandbox.tuning_job_operations import TuningJobs

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    moto = DomainDispatcherApplication(create_backend_app)
    try:
        server = make_server(
            "127.0.0.1", options.port, moto, threaded=True, request_handler=MotoRequestHandler
        )
    except (OSError, SystemExit) as error:
        raise UserError(
            f"cannot use port {options.port}: {error}", "choose another port with --port"
        ) from None
    key = make_access_key()
    service_key = make_access_key()
    sandbox = _describe(server.server_port, key)
    session = make_isolated_session(sandbox.endpoint, service_key, "service", REGION)
    config = Config(retries=client_retries(), user_agent_extra=USER_AGENT, max_pool_connections=50)
    s3 = session.client("s3", config=config)
    logs = session.client("logs", config=config)
    iam = session.client("iam", config=config)
    cloudwatch = session.client("cloudwatch", config=config)
    faults = FaultInjector(options.fault_plan)
    container = {
        name: value for name, value in sandbox.environment.items() if name.startswith("AWS_")
    }
    shared = RunnerEnvironment(
        folder=options.home / _JOBS_FOLDER,
        endpoints=options.home / _ENDPOINTS_FOLDER,
        file_systems=options.home / FILE_SYSTEMS,
        environment={**NO_SHARED_FILES, **container, "AWS_REGION": REGION},
        s3=s3,
        logs=logs,
        cloudwatch=cloudwatch,
        faults=faults,
        max_processes=options.max_processes,
        stop_grace_seconds=options.stop_grace_seconds,
        is_ending=is_ending,
    )
    get_trust_policy = functools.partial(_trust_policy, iam)
    jobs = TrainingJobs(
        _now,
        on_create=lambda job: JobRunner(job, shared).start(),
        get_trust_policy=get_trust_policy,
        s3=s3,
        file_systems=options.home / FILE_SYSTEMS,
    )
    tuning = TuningJobs(_now, jobs)
    batch = ServiceJobs(jobs, faults, _now)
    endpoints = Endpoints(_now, get_trust_policy, shared)
    tags = tag_operations((jobs.jobs, tuning.jobs, *endpoints.collections))
    operations = {**jobs.operations, **tuning.operations, **endpoints.operations, **tags}
    access = AccessControl(server.server_port, key, service_key)
    server.app = HttpFrontend(
        moto=moto,
        sagemaker=operations,
        endpoints=endpoints,
        faults=faults,
        batch=batch,
        access=access,
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    steps = (tuning.advance, batch.schedule)
    threading.Thread(
        target=_schedule, args=(steps, is_ending), name="scheduler", daemon=True
    ).start()
    s3.create_bucket(Bucket=BUCKET, CreateBucketConfiguration={"LocationConstraint": REGION})
    iam.create_role(RoleName=ROLE, AssumeRolePolicyDocument=dump_json(_TRUST))
    iam.put_role_policy(
        RoleName=ROLE, PolicyName="training", PolicyDocument=dump_json(_PERMISSIONS)
    )
    return server, sandbox


def _schedule(steps: tuple[Callable[[], None], ...], is_ending: threading.Event) -> None:
    """Advance tuning jobs and job queues until the sandbox ends."""
    while not is_ending.wait(_SCHEDULE_SECONDS):
        for step in steps:
            try:
                step()
            except Exception:  # noqa: BLE001 (one must not stop the other)
                traceback.print_exc()


def _describe(port: int, access_key: str) -> Sandbox:
    endpoint = f"http://127.0.0.1:{port}"
    role = f"arn:aws:iam::{ACCOUNT}:role/{ROLE}"
    environment = {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": access_key,
        "AWS_SECRET_ACCESS_KEY": "sandbox",
        "AWS_DEFAULT_REGION": REGION,
        "AWS_EC2_METADATA_DISABLED": "true",
        "CLOUDTRAIN_ROLE": role,
        "CLOUDTRAIN_BUCKET": BUCKET,
        "CLOUDTRAIN_REGION": REGION,
        # A client with a proxy would send its key there.
        **exclude_loopback(os.environ),
    }
    return Sandbox(
        endpoint=endpoint,
        role=role,
        bucket=BUCKET,
        environment=environment,
        process=os.getpid(),
    )


def _now() -> float:
    # AWS has a resolution of milliseconds.
    return round(time.time(), 3)


def _trust_policy(iam: Any, arn: str) -> str | None:
    """Return a role's trust policy as JSON, or None if the role does not exist."""
    try:
        role = iam.get_role(RoleName=arn.rpartition("/")[2])["Role"]
    except iam.exceptions.NoSuchEntityException:
        return None
    return dump_json(role["AssumeRolePolicyDocument"])
