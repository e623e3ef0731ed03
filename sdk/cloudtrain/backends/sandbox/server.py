"""The sandbox's process: makes the account, serves until it is told to end, leaves nothing behind."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from cloudtrain.aws.retry import client_retries
from cloudtrain.backends.sandbox.fault_injection import FaultInjector, FaultPlan
from cloudtrain.backends.sandbox.process import (
    REGION,
    STATE_FILE,
    Sandbox,
    client_environment,
    lock_home,
    write_state,
)
from cloudtrain.backends.sandbox.training_job import ACCOUNT, TrainingJob
from cloudtrain.errors import MissingExtraError, UserError
from cloudtrain_runtime.contract import STOP_GRACE_SECONDS
from cloudtrain_runtime.contract.strict_json import dump_json

BUCKET = "cloudtrain-sandbox"
ROLE = "cloudtrain-sandbox"
_JOBS_FOLDER = "jobs"
_KILLS = 2
_TRUST = {
    "Version": "2012-10-17",
    "Statement": [{"Effect": "Allow", "Principal": {"Service": "sagemaker.amazonaws.com"}, "Action": "sts:AssumeRole"}],
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
    """How a sandbox is served.

    Attributes:
        home: Folder of its state file and of the jobs' trees.
        port: Port on loopback; 0 takes a free one.
        most_processes: Ranks that an instance may have, however many GPUs its type has.
        stop_grace_seconds: Seconds between SIGTERM and SIGKILL.
    """

    home: Path
    port: int = 0
    most_processes: int = 2
    stop_grace_seconds: float = STOP_GRACE_SECONDS
    weather: FaultPlan = field(default_factory=FaultPlan)


def serve(options: ServerOptions, on_ready: Callable[[Sandbox], None]) -> None:
    """Serve until SIGINT or SIGTERM; then end every process of every job.

    Args:
        options: How.
        on_ready: Told where it is, once it answers.

    Raises:
        MissingExtraError: moto, psutil or torch is not installed.
        UserError: the port is taken, or the folder belongs to another sandbox.
    """
    _require_parts()
    _lock = lock_home(options.home)  # held until this process is gone
    from cloudtrain.backends.container.process_tree import adopt_orphans, descendants, kill

    shutil.rmtree(options.home / _JOBS_FOLDER, ignore_errors=True)
    adopt_orphans()
    ended = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 (the handler's signature)
        ended.set()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    ending = threading.Event()
    server, sandbox = _start(options, ending)
    try:
        write_state(options.home, sandbox)
        on_ready(sandbox)
        while not ended.wait(1.0):  # a wait without an end would not be interrupted everywhere
            continue
    finally:
        (options.home / STATE_FILE).unlink(missing_ok=True)
        server.shutdown()
        server.server_close()
        ending.set()
        for _ in range(_KILLS):  # what was being started when the first blow fell
            kill(descendants())
    # Threads of jobs may still wait for processes that are gone; nothing is left that they could do.
    os._exit(0)


def _require_parts() -> None:
    import importlib.util

    for module in ("moto", "flask", "psutil", "torch"):
        if importlib.util.find_spec(module) is None:
            raise MissingExtraError(f"the sandbox needs {module}", "pip install 'cloudtrain[sandbox]'")


def _start(options: ServerOptions, ending: threading.Event) -> tuple[Any, Sandbox]:
    """Start the server in a thread, then make the account through it as any client would."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        del os.environ[name]  # nothing of the user's account may reach moto, or a container
    import boto3
    from botocore.config import Config
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
    from werkzeug.serving import make_server

    from cloudtrain.backends.sandbox.access import AccessControl, make_access_key
    from cloudtrain.backends.sandbox.batch_queues import ServiceJobs
    from cloudtrain.backends.sandbox.http_frontend import Environ, HttpFrontend, StartResponse
    from cloudtrain.backends.sandbox.job_runner import JobRunner, RunnerEnvironment
    from cloudtrain.backends.sandbox.s3_sync import USER_AGENT
    from cloudtrain.backends.sandbox.training_job_operations import TrainingJobs

    logging.getLogger("werkzeug").setLevel(logging.ERROR)

    def answer(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        return gate(environ, start_response)  # which needs the port, that the server chooses

    try:
        server = make_server(
            "127.0.0.1",
            options.port,
            answer,
            threaded=True,
            request_handler=MotoRequestHandler,
        )
    except (OSError, SystemExit) as error:
        raise UserError(f"port {options.port} cannot be used: {error}", "choose another with --port") from None
    endpoint = f"http://127.0.0.1:{server.server_port}"
    role = f"arn:aws:iam::{ACCOUNT}:role/{ROLE}"
    key, service_key = make_access_key(), make_access_key()
    access = AccessControl(key, service_key)
    access.listen_on(server.server_port)
    environment = client_environment(endpoint, role, BUCKET, key)
    session = boto3.Session(aws_access_key_id=service_key, aws_secret_access_key="service", region_name=REGION)  # noqa: S106 (no signature is verified)
    config = Config(retries=client_retries(), user_agent_extra=USER_AGENT, max_pool_connections=50)
    s3, logs, iam = (session.client(name, endpoint_url=endpoint, config=config) for name in ("s3", "logs", "iam"))
    sky = FaultInjector(options.weather)
    container = {name: value for name, value in environment.items() if name.startswith("AWS_")}
    service = RunnerEnvironment(
        folder=options.home / _JOBS_FOLDER,
        environment={**container, "AWS_REGION": REGION},
        s3=s3,
        logs=logs,
        sky=sky,
        most_processes=options.most_processes,
        stop_grace_seconds=options.stop_grace_seconds,
        ending=ending,
    )

    def start(job: TrainingJob) -> None:
        JobRunner(job, service).start()

    jobs = TrainingJobs(REGION, _now, start=start, trust=lambda arn: _trust_of(iam, arn), s3=s3)
    batch = ServiceJobs(jobs, sky, _now)
    batch.keep_going(ending)
    gate = HttpFrontend(DomainDispatcherApplication(create_backend_app), jobs, sky, batch, access)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    s3.create_bucket(Bucket=BUCKET, CreateBucketConfiguration={"LocationConstraint": REGION})
    iam.create_role(RoleName=ROLE, AssumeRolePolicyDocument=dump_json(_TRUST))
    iam.put_role_policy(RoleName=ROLE, PolicyName="training", PolicyDocument=dump_json(_PERMISSIONS))
    return server, Sandbox(endpoint, role, BUCKET, environment, os.getpid())


def _now() -> float:
    return round(time.time(), 3)  # AWS tells milliseconds


def _trust_of(iam: Any, arn: str) -> str | None:
    """Return a role's trust policy as JSON, or None when there is no such role."""
    try:
        role = iam.get_role(RoleName=arn.rpartition("/")[2])["Role"]
    except iam.exceptions.NoSuchEntityException:
        return None
    return dump_json(role["AssumeRolePolicyDocument"])
