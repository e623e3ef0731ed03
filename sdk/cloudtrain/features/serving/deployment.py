"""`deploy` and `undeploy`: a model's package, and the model, configuration and endpoint that serve it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from cloudtrain.aws.errors import SuppressCodes, aws_errors
from cloudtrain.aws.retry import OUTAGE_SECONDS, Backoff, OutagePolicy, OutageTolerance, poll
from cloudtrain.backends.base import HostingAccount
from cloudtrain.backends.container.model_server import require_serving
from cloudtrain.backends.sagemaker.endpoint_billing import (
    DELETED,
    EndpointRecord,
    read_endpoint,
    record_deleted,
)
from cloudtrain.backends.sagemaker.uploads import Uploads
from cloudtrain.client.client import Client, client_of
from cloudtrain.client.observer import Observer
from cloudtrain.client.submission import raise_failed
from cloudtrain.errors import CloudError, UserError
from cloudtrain.features.serving.account import open_account
from cloudtrain.features.serving.endpoint_request import (
    VLLM,
    EndpointOptions,
    EndpointRequests,
    check_options,
    make_requests,
    scaling_resource,
)
from cloudtrain.features.serving.endpoints import Endpoint
from cloudtrain.features.serving.package import (
    ServingOptions,
    digest_folder,
    make_package,
    missing_packages,
    pack,
)
from cloudtrain.preflight import start_endpoint_checks
from cloudtrain.preflight.base import find
from cloudtrain.runs.run import Run, RunLike
from cloudtrain.settings.settings import Settings
from cloudtrain.support.argument_types import check_type
from cloudtrain.support.backend_facts import backend_option, choose_backend, facts_of
from cloudtrain_runtime.contract.aws_codes import MISSING_IN_SAGEMAKER
from cloudtrain_runtime.contract.strict_json import dump_json, load_json

if TYPE_CHECKING:
    from types_boto3_sagemaker import SageMakerClient

_PACKAGE: Final = "model.tar.gz"
_IN_SERVICE = "InService"
_FAILED = ("Failed", "OutOfService", "UpdateRollbackFailed")
_CHANGING = ("Creating", "Updating", "SystemUpdating", "RollingBack")
_DELETING = "Deleting"
_GONE = "deleted"
_WAIT_SECONDS = 3600.0
_ANSWERED = OutagePolicy(unanswered_limit_seconds=OUTAGE_SECONDS)
"""AWS has answered before a wait begins."""
_JSON: Final = "application/json"
_PROBE = b'{"inputs": []}'
"""A request that a model of `cloudtrain` refuses by itself, so that its answer shows that it runs."""

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Deployment:
    """An endpoint that serves a run's model, or the plan of one.

    Attributes:
        name: Name of the endpoint.
        backend: `sagemaker` or `sandbox`.
        requests: The requests that create it, by operation.
        usd_per_hour: Price of its instances; None where it is unknown or the endpoint is serverless.
        checks: What was checked, one sentence each.
        existed: Whether an earlier deploy of the same model and options had created it.
        answer: Answer to the one request that was sent to it, or an empty string.
    """

    name: str
    backend: str
    requests: EndpointRequests
    usd_per_hour: float | None
    checks: tuple[str, ...] = ()
    existed: bool = False
    answer: str = ""
    account: HostingAccount | None = field(default=None, repr=False)

    def invoke(self, content: Any) -> Any:
        """Send a request with JSON to the endpoint; return the answer's content.

        Raises:
            UserError: This is a plan, and there is no endpoint; or the model refuses the content.
            CloudError: AWS refused or cannot be reached.
        """
        if self.account is None:
            raise UserError(
                f"there is no endpoint {self.name} yet: this is a plan", "leave out plan=True"
            )
        return load_json(_invoke(self.account, self.name, dump_json(content).encode(), _JSON))

    def to_json(self) -> dict[str, Any]:
        """Return the object that `deploy --json` prints."""
        return {
            "endpoint": self.name,
            "place": self.backend,
            "usd_per_hour": self.usd_per_hour,
            "existed": self.existed,
            "answer": self.answer,
            "checks": list(self.checks),
            "requests": self.requests.to_json(),
        }


def deploy(
    run: RunLike,
    options: EndpointOptions | None = None,
    *,
    serving: ServingOptions | None = None,
    backend: str | None = None,
    sandbox: bool = False,
    plan: bool = False,
    sample: str | Path | None = None,
    settings: Settings | None = None,
    observer: Observer | None = None,
    client: Client | None = None,
) -> Deployment:
    """Create an endpoint for a run's model, wait until it is in service, and send one request to it.

    A repeated call with the same model and options creates nothing.

    Args:
        run: The run, of a Task.
        options: The endpoint: instances or serverless, scaling, image.
        serving: The model: checkpoint, batches, replicas and GPUs.
        backend: Where the endpoint is: `sagemaker` by default, or `sandbox`.
        sandbox: The same as `backend="sandbox"`.
        plan: Change nothing; return what would be sent.
        sample: File with a request to send: .json, .npy or an image.
        settings: The account; by default from environment and files.
        observer: Receives a sentence at each step (`on_progress`).
        client: The client that finds the run and whose account is used, in place of `settings` and `observer`.

    Raises:
        UserError: The run has no such model, the options contradict each other, an endpoint of this name serves
            something else, or the sandbox has no such engine.
        NoCapacityError: The quota of endpoint instances is used up; nothing was created.
        MissingExtraError: The sandbox cannot serve, because the extra `serve` is not installed.
        CloudError: A check of the account failed and nothing was created; or AWS refused, cannot be reached, or the
            endpoint has failed. What was created is named.
    """
    check_type("options", options, EndpointOptions)
    check_type("serving", serving, ServingOptions)
    chosen = options or EndpointOptions()
    check_options(chosen)
    place = facts_of(choose_backend(backend, sandbox=sandbox))
    client = client_of(client, settings, observer)
    progress = client.session.observer.on_progress
    # The sandbox's endpoints are processes of this machine.
    if place.is_on_this_machine and not plan:
        if chosen.engine == VLLM:
            hint = "to see the requests and checks, add --plan"
            raise UserError("the sandbox runs no vLLM, which needs a GPU", hint)
        require_serving()
    content = _read_sample(None if sample is None else Path(sample))
    handle = client.get_run(run)
    account = open_account(client.session, place.name)
    with tempfile.TemporaryDirectory(prefix="cloudtrain-deploy-") as folder:
        progress("making the package")
        archive, digest, warnings = _make_archive(
            handle, Path(folder), chosen, serving or ServingOptions()
        )
        uri = _uri(account.settings, handle.id, digest, chosen)
        requests = make_requests(handle.id, uri, digest, chosen, account.settings)
        existing = _find_endpoint(account, requests.name)
        checks = (*_check(account, requests, existing), *warnings)
        if existing is None and not chosen.skip_check:
            progress("checking permissions and quotas")
            checks += _check_account(account, requests, plan=plan)
        price = _price(account, chosen)
        deployment = Deployment(
            name=requests.name,
            backend=account.backend.name,
            requests=requests,
            usd_per_hour=price,
            checks=checks,
            existed=existing is not None,
        )
        if plan:
            return deployment
        if existing is None:
            progress("uploading the package")
            _upload(account, archive, uri)
        try:
            answer = _start(account, requests, content, progress)
        except BaseException:
            left = f"what was created of {requests.name} is still there"
            if not account.backend.is_simulated:
                left += ", and an endpoint with instances costs money"
            undo = _undeploy_command(account, requests.name)
            progress(f"{left}; to delete it: {undo}")
            raise
    return dataclasses.replace(deployment, answer=answer, account=account)


def _undeploy_command(account: HostingAccount, name: str) -> str:
    return f"cloudtrain undeploy {name}{backend_option(account.backend.name)}"


def undeploy(
    name: str | Deployment | Endpoint,
    *,
    backend: str | None = None,
    sandbox: bool = False,
    settings: Settings | None = None,
    observer: Observer | None = None,
    client: Client | None = None,
) -> tuple[str, ...]:
    """Delete an endpoint with its scaling, configurations and models; return what was deleted.

    Args:
        name: The endpoint, or its name.
        backend: Where it is: `sagemaker` by default, or `sandbox`.
        sandbox: The same as `backend="sandbox"`.
        settings: The account; by default from environment and files.
        observer: Receives what is waited for (`on_progress`).
        client: The client whose account is used, in place of `settings` and `observer`.

    Raises:
        UserError: There is nothing of this name.
        CloudError: AWS refused or cannot be reached.
    """
    name = name if isinstance(name, str) else name.name
    session = client_of(client, settings, observer).session
    account = open_account(session, choose_backend(backend, sandbox=sandbox))
    sagemaker: SageMakerClient = account.client("sagemaker")
    deleted = list[str]()
    with aws_errors("delete the endpoint"):
        configs = _names(sagemaker, "EndpointConfig", name)
        models = _names(sagemaker, "Model", name)
        found = _find_endpoint(account, name)
        if found is not None:
            configs.add(found["EndpointConfigName"])
        for config in configs:
            with SuppressCodes(MISSING_IN_SAGEMAKER):
                described = sagemaker.describe_endpoint_config(EndpointConfigName=config)
                models |= {
                    each["ModelName"]
                    for each in described["ProductionVariants"]
                    if "ModelName" in each
                }
        if found is not None:
            deleted += _delete_scaling(account, name)
            _delete_endpoint(account, found, session.observer.on_progress)
            deleted.append(f"endpoint {name}")
        for config in sorted(configs):
            with SuppressCodes(MISSING_IN_SAGEMAKER):
                sagemaker.delete_endpoint_config(EndpointConfigName=config)
                deleted.append(f"endpoint configuration {config}")
        for model in sorted(models):
            with SuppressCodes(MISSING_IN_SAGEMAKER):
                sagemaker.delete_model(ModelName=model)
                deleted.append(f"model {model}")
    if not deleted:
        raise UserError(
            f"there is no endpoint {name} in {account.backend.name}",
            "see: cloudtrain list --endpoints",
        )
    return tuple(deleted)


def _delete_endpoint(account: HostingAccount, found: dict[str, Any], progress: Progress) -> None:
    from botocore.exceptions import BotoCoreError, ClientError

    client: SageMakerClient = account.client("sagemaker")
    name = str(found["EndpointName"])
    progress("deleting the endpoint")
    used: EndpointRecord | None = None
    # An unknown cost must not prevent the deletion.
    with contextlib.suppress(ClientError, BotoCoreError):
        used = read_endpoint(client, found)
    again = "repeat the command later"
    if (status := found["EndpointStatus"]) in _CHANGING:
        progress(
            f"the endpoint is {status}: waiting, because AWS cannot delete it before that ends"
        )
        status, _ = _wait(account, name, (_IN_SERVICE, _DELETING, *_FAILED), again, progress)
    if status not in (_DELETING, _GONE):
        client.delete_endpoint(EndpointName=name)
    # AWS keeps no list of what was deleted, and `costs` sums it.
    if used is not None:
        record_deleted(
            account.backend.name,
            dataclasses.replace(used, deleted=time.time(), state=DELETED),
            os.environ,
        )
    _wait(account, name, (), again, progress)


def _read_sample(path: Path | None) -> tuple[bytes, str]:
    """Return content and type of the request to send: a file's, or a request that shows only that the model runs.

    Raises:
        UserError: The file is of an unknown kind.
    """
    if path is None:
        return _PROBE, _JSON
    types = {".json": _JSON, ".npy": "application/x-npy", ".png": "image/png", ".jpg": "image/jpeg"}
    if path.suffix not in types:
        raise UserError(f"{path}: expected one of {', '.join(types)}", "name a file of this kind")
    return path.read_bytes(), types[path.suffix]


def _invoke(account: HostingAccount, name: str, body: bytes, kind: str) -> str:
    """Send one request to an endpoint; return its answer.

    Raises:
        UserError: The model refuses the content.
        CloudError: The endpoint does not answer.
    """
    from botocore.exceptions import ClientError

    with aws_errors("invoke the endpoint"):
        client = account.client("sagemaker-runtime")
        try:
            answer = client.invoke_endpoint(EndpointName=name, Body=body, ContentType=kind)
            return str(answer["Body"].read().decode("utf-8", "replace"))
        except ClientError as error:
            # With the fields of ModelError, which other errors do not have.
            response: Mapping[str, Any] = error.response
            status = response.get("OriginalStatusCode")
            text = str(response.get("OriginalMessage", ""))
            if status is None:
                raise
            if status >= 500:  # noqa: PLR2004 (HTTP)
                log = "its log: CloudWatch, /aws/sagemaker/Endpoints"
                raise CloudError(f"{name} answers {status}: {text}", log) from None
            # A request of the user may have the same content.
            if body is _PROBE:
                return text
            hint = "send what predict_input() of the Task takes: docs/how-to/serve.md"
            raise UserError(f"{name} refuses the request with {status}: {text}", hint) from None


def _make_archive(
    run: Run, folder: Path, options: EndpointOptions, serving: ServingOptions
) -> tuple[Path, str, tuple[str, ...]]:
    """Return the package as one archive, or as a folder for vLLM, its digest, and a warning of what the image lacks."""
    if options.engine == VLLM:
        from cloudtrain.features.serving.hugging_face import export_model

        return (*export_model(run, folder / "model", serving.checkpoint), ())
    if options.has_gpu and serving.gpus == 0:
        serving = dataclasses.replace(serving, gpus=1.0)
    package = folder / "package"
    archive = folder / _PACKAGE
    task = make_package(run, package, serving)
    pack(package, archive)
    names = "" if options.image else ", ".join(missing_packages(package, task))
    warning = (
        f"AWS's image may lack {names}, which the code imports: name them in code.requirements"
    )
    return archive, digest_folder(package), (warning,) if names else ()


def _uri(settings: Settings, run: str, digest: str, options: EndpointOptions) -> str:
    prefix = f"{settings.prefix.strip('/')}/" if settings.prefix else ""
    folder = f"s3://{settings.bucket}/{prefix}packages/{run}/{digest[:16]}/"
    return folder if options.engine == VLLM else f"{folder}{_PACKAGE}"


def _find_endpoint(account: HostingAccount, name: str) -> dict[str, Any] | None:
    with aws_errors("describe the endpoint"):
        return find(
            MISSING_IN_SAGEMAKER, account.client("sagemaker").describe_endpoint, EndpointName=name
        )


def _check(
    account: HostingAccount, requests: EndpointRequests, existing: dict[str, Any] | None
) -> tuple[str, ...]:
    """Return what was checked.

    Raises:
        UserError: AWS would refuse a request, or the endpoint exists with another model or other options.
    """
    if problems := requests.problems():
        raise UserError("AWS would refuse the requests: " + "; ".join(problems))
    done = ["the requests fit AWS's model"]
    if existing is None:
        return (*done, f"no endpoint of the name {requests.name} exists in {account.backend.name}")
    if existing["EndpointConfigName"] != requests.config["EndpointConfigName"]:
        raise UserError(
            f"the endpoint {requests.name} exists, with another model or other options",
            f"{_undeploy_command(account, requests.name)}, or choose another name: --name",
        )
    if existing["EndpointStatus"] in _FAILED:
        reason = existing.get("FailureReason", "unknown reason")
        raise UserError(
            f"the endpoint {requests.name} has failed: {reason}",
            _undeploy_command(account, requests.name),
        )
    return (
        *done,
        f"the endpoint {requests.name} exists with this model and these options: nothing is created",
    )


def _check_account(
    account: HostingAccount, requests: EndpointRequests, *, plan: bool
) -> tuple[str, ...]:
    """Return what the checks of the account found; a sandbox has neither quotas nor permissions.

    Raises:
        CloudError: A check has failed, and this is no plan.
    """
    if account.backend.is_simulated:
        return (
            "a sandbox has no quotas and permissions: `--plan` without --sandbox checks those of the account",
        )
    found = start_endpoint_checks(requests.to_json(), account.settings, account.session()).wait()
    if not plan:
        raise_failed(
            found, "see all of them: cloudtrain deploy RUN --plan; to deploy anyway: --skip-check"
        )
    return tuple(each.describe() for each in found)


def _upload(account: HostingAccount, archive: Path, uri: str) -> None:
    with aws_errors("upload the package"):
        uploads = Uploads(account.client("s3"))
        if archive.is_dir():
            uploads.add_folder(archive, uri)
        else:
            uploads.add_archive(archive, uri)
        uploads.send()


def _start(
    account: HostingAccount,
    requests: EndpointRequests,
    content: tuple[bytes, str],
    progress: Progress,
) -> str:
    """Create what does not exist, wait until it is in service, and return the answer to one request."""
    client: SageMakerClient = account.client("sagemaker")
    steps = (
        ("Model", client.describe_model, client.create_model, requests.model),
        (
            "EndpointConfig",
            client.describe_endpoint_config,
            client.create_endpoint_config,
            requests.config,
        ),
        ("Endpoint", client.describe_endpoint, client.create_endpoint, requests.endpoint),
    )
    # An earlier deploy may have been interrupted.
    for kind, describe, create, request in steps:
        name = str(request[f"{kind}Name"])
        with aws_errors(f"create the {kind}"):
            if find(MISSING_IN_SAGEMAKER, describe, **{f"{kind}Name": name}) is None:
                progress(f"creating {name}")
                create(**request)
    progress("waiting until the endpoint is in service")
    undo = _undeploy_command(account, requests.name)
    status, reason = _wait(account, requests.name, (_IN_SERVICE, *_FAILED), undo, progress)
    if status != _IN_SERVICE:
        raise CloudError(f"the endpoint {requests.name} is {status}: {reason}", undo)
    if requests.scaling:
        with aws_errors("set the bounds of the endpoint's instances"):
            scaling = account.client("application-autoscaling")
            scaling.register_scalable_target(**requests.scaling["RegisterScalableTarget"])
            scaling.put_scaling_policy(**requests.scaling["PutScalingPolicy"])
    return _invoke(account, requests.name, *content)


def _wait(
    account: HostingAccount, name: str, ends: Collection[str], hint: str, progress: Progress
) -> tuple[str, str]:
    """Wait until an endpoint has one of these statuses, or does not exist; return its status and AWS's reason."""
    status = "unknown"
    for found in poll(
        lambda: _find_endpoint(account, name) or {"EndpointStatus": _GONE},
        Backoff(account.poll_seconds, account.poll_seconds),
        OutageTolerance(progress, _ANSWERED, note="retrying"),
        timeout_seconds=_WAIT_SECONDS,
    ):
        status = str(found["EndpointStatus"])
        if status in (*ends, _GONE):
            return status, str(found.get("FailureReason", "unknown reason"))
    raise CloudError(f"the endpoint {name} is still {status} after an hour", hint)


def _delete_scaling(account: HostingAccount, name: str) -> list[str]:
    client = account.client("application-autoscaling")
    resource = scaling_resource(name)
    found = client.describe_scalable_targets(
        ServiceNamespace=resource["ServiceNamespace"], ResourceIds=[resource["ResourceId"]]
    )["ScalableTargets"]
    if not found:
        return []
    client.deregister_scalable_target(**resource)
    return [f"scaling target {resource['ResourceId']}"]


def _names(
    client: SageMakerClient, kind: Literal["EndpointConfig", "Model"], name: str
) -> set[str]:
    """Return the models or configurations that `deploy` has created for an endpoint: its name and eight digits."""
    operation: Literal["list_endpoint_configs", "list_models"] = "list_endpoint_configs"
    if kind == "Model":
        operation = "list_models"
    pages: Iterable[Mapping[str, Any]] = client.get_paginator(operation).paginate(
        NameContains=name[:63]
    )
    found = (str(each[f"{kind}Name"]) for page in pages for each in page[f"{kind}s"])
    return {each for each in found if re.fullmatch(rf"{re.escape(name)}-[0-9a-f]{{8}}", each)}


def _price(account: HostingAccount, options: EndpointOptions) -> float | None:
    if options.serverless is not None:
        return None
    each = account.usd_per_hour(options.instance_type)
    return None if each is None else each * options.instances
