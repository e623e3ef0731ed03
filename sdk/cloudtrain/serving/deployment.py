"""`deploy` and `undeploy`: a model's package, and the model, configuration and endpoint that serve it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from cloudtrain.aws.errors import SuppressCodes, aws_errors
from cloudtrain.backends.container.model_server import require_ray
from cloudtrain.backends.sagemaker.endpoint_billing import DELETED, EndpointRecord, read_endpoint, record_deleted
from cloudtrain.backends.sagemaker.uploads import Uploads
from cloudtrain.client.shortcuts import get_run
from cloudtrain.client.submission import raise_failed
from cloudtrain.errors import CloudError, UserError
from cloudtrain.preflight import start_endpoint_checks
from cloudtrain.preflight.summary import describe_check
from cloudtrain.runs.run import Run, RunLike
from cloudtrain.serving.account import Account, open_account
from cloudtrain.serving.endpoint_request import (
    VLLM,
    EndpointOptions,
    EndpointRequests,
    check_options,
    make_requests,
    scaling_resource,
)
from cloudtrain.serving.package import ServingOptions, make_package
from cloudtrain.settings.settings import Settings
from cloudtrain_runtime.contract.strict_json import dump_json

_PACKAGE: Final = "model.tar.gz"
_IN_SERVICE, _FAILED = "InService", ("Failed", "OutOfService", "UpdateRollbackFailed")
_CHANGING = ("Creating", "Updating", "SystemUpdating", "RollingBack")
_WAIT_SECONDS = 3600.0
_ABSENT = "ValidationException"
"""SageMaker's answer about a model, a configuration or an endpoint that does not exist."""
_JSON: Final = "application/json"
_PROBE = b'{"inputs": []}'
"""A request that a model of `cloudtrain` refuses by itself, so that its answer shows that it runs."""

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Deployment:
    """An endpoint that serves a run's model, or the plan of one.

    Attributes:
        name: Name of the endpoint.
        place: `sagemaker` or `sandbox`.
        requests: The requests that create it, by operation.
        usd_per_hour: Price of its instances; None where it is unknown or the endpoint is serverless.
        checks: What was checked, one sentence each.
        existed: Whether an earlier deploy of the same model and options had created it.
        answer: Answer to the one request that was sent to it, or an empty string.
    """

    name: str
    place: str
    requests: EndpointRequests
    usd_per_hour: float | None
    checks: tuple[str, ...] = ()
    existed: bool = False
    answer: str = ""
    account: Account | None = field(default=None, repr=False)

    def invoke(self, content: Any) -> Any:
        """Send a request with JSON to the endpoint; return the answer's content.

        Raises:
            UserError: This is a plan, and there is no endpoint; or the model refuses the content.
            CloudError: AWS refused or cannot be reached.
        """
        if self.account is None:
            raise UserError(f"there is no endpoint {self.name} yet: this is a plan", "leave out plan=True")
        return json.loads(_invoke(self.account, self.name, dump_json(content).encode(), _JSON))

    def to_json(self) -> dict[str, Any]:
        """Return the object that `deploy --json` prints."""
        return {
            "endpoint": self.name,
            "place": self.place,
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
    sandbox: bool = False,
    plan: bool = False,
    settings: Settings | None = None,
    sample: Path | None = None,
    progress: Progress = lambda _: None,
) -> Deployment:
    """Create an endpoint for a run's model, wait until it is in service, and send one request to it.

    A repeated call with the same model and options creates nothing.

    Args:
        run: The run, of a Task.
        options: The endpoint: instances or serverless, scaling, image.
        serving: The model: checkpoint, batches, replicas and GPUs.
        sandbox: Deploy to the sandbox of this machine.
        plan: Change nothing; return what would be sent.
        settings: The account; by default from environment and files.
        sample: File with a request to send: .json, .npy or an image.
        progress: Called with a sentence at each step.

    Raises:
        UserError: The run has no such model, the options contradict each other, an endpoint of this name serves
            something else, or the sandbox has no such engine.
        NoCapacityError: The quota of endpoint instances is used up; nothing was created.
        MissingExtraError: The sandbox cannot serve, because Ray is not installed.
        CloudError: A check of the account failed and nothing was created; or AWS refused, cannot be reached, or the
            endpoint has failed. What was created is named.
    """
    chosen = options or EndpointOptions()
    check_options(chosen)
    if sandbox and not plan:
        _check_sandbox(chosen)
    handle = get_run(run)
    account = open_account(sandbox=sandbox, settings=settings)
    with tempfile.TemporaryDirectory(prefix="cloudtrain-deploy-") as folder:
        progress("making the package")
        archive, digest, missing = _make_archive(handle, Path(folder), chosen, serving or ServingOptions())
        uri = _uri(account.settings, handle.id, digest, chosen)
        requests = make_requests(handle.id, uri, digest, chosen, account.settings)
        existing = _find_endpoint(account, requests.name)
        checks = (*_check(account, requests, existing), *_warnings(missing, chosen))
        if existing is None and not chosen.skip_check:
            progress("checking permissions and quotas")
            checks += _check_account(account, requests, plan=plan)
        price = _price(account, chosen)
        deployment = Deployment(requests.name, account.name, requests, price, checks, existed=existing is not None)
        if plan:
            return deployment
        if existing is None:
            progress("uploading the package")
            _upload(account, archive, uri)
        with _named_if_left(account, requests.name, progress):
            _create(account, requests, progress)
            progress("waiting until the endpoint is in service")
            _wait(account, requests.name)
            if requests.scaling:
                _scale(account, requests)
            answer = invoke_once(account, requests.name, sample)
    return dataclasses.replace(deployment, answer=answer, account=account)


@contextlib.contextmanager
def _named_if_left(account: Account, name: str, progress: Progress) -> Iterator[None]:
    """Report how to delete what was created, if the block does not end as planned."""
    try:
        yield
    except BaseException:
        cost = "" if account.is_sandbox else ", and an endpoint with instances costs money"
        progress(f"what was created of {name} is still there{cost}; to delete it: {_undeploy_command(account, name)}")
        raise


def _undeploy_command(account: Account, name: str) -> str:
    return f"cloudtrain undeploy {name}{' --sandbox' if account.is_sandbox else ''}"


def _check_sandbox(options: EndpointOptions) -> None:
    """Raise an error if the sandbox cannot serve, whose endpoints are processes of this machine."""
    if options.engine == VLLM:
        raise UserError("the sandbox runs no vLLM, which needs a GPU", "to see the requests and checks, add --plan")
    require_ray()


def undeploy(
    name: str, *, sandbox: bool = False, settings: Settings | None = None, progress: Progress = lambda _: None
) -> tuple[str, ...]:
    """Delete an endpoint with its scaling, configurations and models; return what was deleted.

    Raises:
        UserError: There is nothing of this name.
        CloudError: AWS refused or cannot be reached.
    """
    account = open_account(sandbox=sandbox, settings=settings)
    client, deleted = account.client("sagemaker"), list[str]()
    with aws_errors("delete the endpoint"):
        configs = {each for each in _names(client, "EndpointConfig", name) if _belongs(each, name)}
        found = _find_endpoint(account, name)
        if found is not None:
            configs.add(found["EndpointConfigName"])
        models = {each for each in _names(client, "Model", name) if _belongs(each, name)}
        for config in configs:
            with SuppressCodes(_ABSENT):
                described = client.describe_endpoint_config(EndpointConfigName=config)
                models |= {each["ModelName"] for each in described["ProductionVariants"] if "ModelName" in each}
        if found is not None:
            deleted += _delete_scaling(account, name)
            progress("deleting the endpoint")
            used = _read_use(client, found)
            if _wait_while_changing(account, name, progress) != "Deleting":
                client.delete_endpoint(EndpointName=name)
            if used is not None:  # AWS keeps no list of what was deleted, and `costs` sums it
                record_deleted(account.name, dataclasses.replace(used, deleted=time.time(), state=DELETED), os.environ)
            _wait_until_deleted(account, name)
            deleted.append(f"endpoint {name}")
        for config in sorted(configs):
            with SuppressCodes(_ABSENT):
                client.delete_endpoint_config(EndpointConfigName=config)
                deleted.append(f"endpoint configuration {config}")
        for model in sorted(models):
            with SuppressCodes(_ABSENT):
                client.delete_model(ModelName=model)
                deleted.append(f"model {model}")
    if not deleted:
        raise UserError(f"there is no endpoint {name} in {account.name}", "see: cloudtrain list --endpoints")
    return tuple(deleted)


def _read_use(client: Any, found: dict[str, Any]) -> EndpointRecord | None:
    """Return what is billed for an endpoint; None if AWS does not answer, which must not prevent its deletion."""
    from botocore.exceptions import BotoCoreError, ClientError

    with contextlib.suppress(ClientError, BotoCoreError):
        return read_endpoint(client, found)
    return None


def invoke_once(account: Account, name: str, sample: Path | None) -> str:
    """Send one request to an endpoint; return its answer.

    Without a sample it is a request that the model refuses by itself, which shows that it runs.

    Raises:
        UserError: The endpoint refuses the sample.
        CloudError: The endpoint does not answer.
    """
    types = {".json": _JSON, ".npy": "application/x-npy", ".png": "image/png", ".jpg": "image/jpeg"}
    if sample is not None and sample.suffix not in types:
        raise UserError(f"{sample}: expected one of {', '.join(types)}", "name a file of this kind")
    if sample is None:
        return _invoke(account, name, _PROBE, _JSON, is_probe=True)
    return _invoke(account, name, sample.read_bytes(), types[sample.suffix])


def _invoke(account: Account, name: str, body: bytes, kind: str, *, is_probe: bool = False) -> str:
    from botocore.exceptions import ClientError

    with aws_errors("invoke the endpoint"):
        client = account.client("sagemaker-runtime")
        try:
            answer = client.invoke_endpoint(EndpointName=name, Body=body, ContentType=kind)
            return str(answer["Body"].read().decode("utf-8", "replace"))
        except ClientError as error:
            status = error.response.get("OriginalStatusCode")
            text = str(error.response.get("OriginalMessage", ""))
            if is_probe and status is not None and status < 500:  # noqa: PLR2004 (HTTP)
                return text
            if status is not None and status < 500:  # noqa: PLR2004 (HTTP)
                hint = "send what predict_input() of the Task takes: docs/how-to/serve.md"
                raise UserError(f"{name} refuses the request with {status}: {text}", hint) from None
            if status is not None:
                raise CloudError(
                    f"{name} answers {status}: {text}", "its log: CloudWatch, /aws/sagemaker/Endpoints"
                ) from None
            raise


def _make_archive(
    run: Run, folder: Path, options: EndpointOptions, serving: ServingOptions
) -> tuple[Path, str, tuple[str, ...]]:
    """Return the package as one archive, or as a folder for vLLM, its digest, and modules that the image lacks."""
    if options.engine == VLLM:
        from cloudtrain.serving.hugging_face import export_model

        return (*export_model(run, folder / "model", serving.checkpoint), ())
    if options.has_gpu and serving.gpus == 0:
        serving = dataclasses.replace(serving, gpus=1.0)
    package = make_package(run, folder / "package", serving)
    return package.pack(folder / _PACKAGE), package.digest(), package.missing_packages()


def _warnings(missing: tuple[str, ...], options: EndpointOptions) -> tuple[str, ...]:
    if not missing or options.image:
        return ()
    return (f"AWS's image may lack {', '.join(missing)}, which the code imports: name them in code.requirements",)


def _uri(settings: Settings, run: str, digest: str, options: EndpointOptions) -> str:
    prefix = f"{settings.prefix.strip('/')}/" if settings.prefix else ""
    folder = f"s3://{settings.bucket}/{prefix}{run}/endpoint/{digest[:16]}/"
    return folder if options.engine == VLLM else f"{folder}{_PACKAGE}"


def _find_endpoint(account: Account, name: str) -> dict[str, Any] | None:
    with aws_errors("describe the endpoint"), SuppressCodes(_ABSENT):
        found: dict[str, Any] = account.client("sagemaker").describe_endpoint(EndpointName=name)
        return found
    return None


def _check(account: Account, requests: EndpointRequests, existing: dict[str, Any] | None) -> tuple[str, ...]:
    """Return what was checked.

    Raises:
        UserError: AWS would refuse a request, or the endpoint exists with another model or other options.
    """
    if problems := requests.problems():
        raise UserError("AWS would refuse the requests: " + "; ".join(problems))
    done = ["the requests fit AWS's model"]
    if existing is None:
        return (*done, f"no endpoint of the name {requests.name} exists in {account.name}")
    if existing["EndpointConfigName"] != requests.config["EndpointConfigName"]:
        raise UserError(
            f"the endpoint {requests.name} exists, with another model or other options",
            f"{_undeploy_command(account, requests.name)}, or choose another name: --name",
        )
    if existing["EndpointStatus"] in _FAILED:
        reason = existing.get("FailureReason", "unknown reason")
        raise UserError(f"the endpoint {requests.name} has failed: {reason}", _undeploy_command(account, requests.name))
    return (*done, f"the endpoint {requests.name} exists with this model and these options: nothing is created")


def _check_account(account: Account, requests: EndpointRequests, *, plan: bool) -> tuple[str, ...]:
    """Return what the checks of the account found; a sandbox has neither quotas nor permissions.

    Raises:
        CloudError: A check has failed, and this is no plan.
    """
    if account.is_sandbox:
        return ("a sandbox has no quotas and permissions: `--plan` without --sandbox checks those of the account",)
    found = start_endpoint_checks(requests.to_json(), account.settings, account.clients.session()).wait()
    if not plan:
        raise_failed(found, "see all of them: cloudtrain deploy RUN --plan; to deploy anyway: --skip-check")
    return tuple(describe_check(each) for each in found)


def _upload(account: Account, archive: Path, uri: str) -> None:
    with aws_errors("upload the package"):
        uploads = Uploads(account.client("s3"))
        if archive.is_dir():
            uploads.add_folder(archive, uri)
        else:
            uploads.add_archive(archive, uri)
        uploads.send()


def _create(account: Account, requests: EndpointRequests, progress: Progress) -> None:
    """Create what does not exist yet: an earlier deploy may have been interrupted."""
    client = account.client("sagemaker")
    steps = (
        ("Model", client.describe_model, client.create_model, requests.model),
        ("EndpointConfig", client.describe_endpoint_config, client.create_endpoint_config, requests.config),
        ("Endpoint", client.describe_endpoint, client.create_endpoint, requests.endpoint),
    )
    for kind, describe, create, request in steps:
        with aws_errors(f"create the {kind}"):
            exists = False
            with SuppressCodes(_ABSENT):
                describe(**{f"{kind}Name": request[f"{kind}Name"]})
                exists = True
            if not exists:
                progress(f"creating {request[f'{kind}Name']}")
                create(**request)


def _wait(account: Account, name: str) -> None:
    deadline = time.monotonic() + _WAIT_SECONDS
    while True:
        found = _find_endpoint(account, name)
        status = "deleted" if found is None else found["EndpointStatus"]
        if status == _IN_SERVICE:
            return
        if found is None or status in _FAILED:
            reason = (found or {}).get("FailureReason", "unknown reason")
            raise CloudError(f"the endpoint {name} is {status}: {reason}", _undeploy_command(account, name))
        if time.monotonic() > deadline:
            raise CloudError(f"the endpoint {name} is still {status} after an hour", _undeploy_command(account, name))
        time.sleep(account.poll_seconds)


def _wait_while_changing(account: Account, name: str, progress: Progress) -> str:
    """Wait until AWS can delete an endpoint; return its status. AWS refuses while it creates or changes one."""
    deadline, is_reported = time.monotonic() + _WAIT_SECONDS, False
    while True:
        found = _find_endpoint(account, name)
        status = "Deleting" if found is None else str(found["EndpointStatus"])
        if status not in _CHANGING:
            return status
        if time.monotonic() > deadline:
            raise CloudError(f"the endpoint {name} is still {status} after an hour", "repeat the command later")
        if not is_reported:
            progress(f"the endpoint is {status}: waiting, because AWS cannot delete it before that ends")
            is_reported = True
        time.sleep(account.poll_seconds)


def _wait_until_deleted(account: Account, name: str) -> None:
    deadline = time.monotonic() + _WAIT_SECONDS
    while _find_endpoint(account, name) is not None:
        if time.monotonic() > deadline:
            raise CloudError(f"the endpoint {name} is not deleted after an hour", "repeat the command later")
        time.sleep(account.poll_seconds)


def _scale(account: Account, requests: EndpointRequests) -> None:
    with aws_errors("set the bounds of the endpoint's instances"):
        client = account.client("application-autoscaling")
        client.register_scalable_target(**requests.scaling["RegisterScalableTarget"])
        client.put_scaling_policy(**requests.scaling["PutScalingPolicy"])


def _delete_scaling(account: Account, name: str) -> list[str]:
    client, resource = account.client("application-autoscaling"), scaling_resource(name)
    found = client.describe_scalable_targets(
        ServiceNamespace=resource["ServiceNamespace"], ResourceIds=[resource["ResourceId"]]
    )["ScalableTargets"]
    if not found:
        return []
    client.deregister_scalable_target(**resource)
    return [f"scaling target {resource['ResourceId']}"]


def _names(client: Any, kind: str, part: str) -> Iterator[str]:
    operation = {"EndpointConfig": "list_endpoint_configs", "Model": "list_models"}[kind]
    for page in client.get_paginator(operation).paginate(NameContains=part[:63]):
        yield from (each[f"{kind}Name"] for each in page[f"{kind}s"])


def _belongs(found: str, name: str) -> bool:
    """Return whether a model or configuration is named as `deploy` names those of an endpoint."""
    digest = found.removeprefix(f"{name}-")
    return found != digest and len(digest) == 8 and all(each in "0123456789abcdef" for each in digest)  # noqa: PLR2004


def _price(account: Account, options: EndpointOptions) -> float | None:
    if options.serverless is not None:
        return None
    if account.is_sandbox:
        return 0.0
    each = account.prices.hosting_usd_per_hour(options.instance_type, account.settings.region or "")
    return None if each is None else each * options.instances
