"""Commands about served models: serve, deploy, undeploy, and the list of endpoints."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cloudtrain import console
from cloudtrain.cli.examples import Command
from cloudtrain.cli.options import (
    json_option,
    listed_backends,
    option_group,
    parse_step,
    parsed_by,
    profile_option,
    run_argument,
    trust_option,
)
from cloudtrain.features.serving import output as shown
from cloudtrain.support.backend_facts import BACKENDS, facts_of

if TYPE_CHECKING:
    from cloudtrain.features.serving.endpoint_request import EndpointOptions
    from cloudtrain.features.serving.package import ServingOptions


def _build_serving(**values: object) -> object:
    from cloudtrain.features.serving.package import ServingOptions

    return ServingOptions(**values)  # type: ignore[arg-type]


serving_options = option_group(
    "options",
    _build_serving,
    click.option(
        "--checkpoint",
        callback=parsed_by(parse_step("best")),
        metavar="STEP|best",
        help="Weights of a checkpoint, not the exported.",
    ),
    click.option(
        "--max-batch",
        type=click.IntRange(min=1),
        default=16,
        show_default=True,
        metavar="N",
        help="Most samples at once.",
    ),
    click.option(
        "--batch-wait",
        "batch_wait_seconds",
        type=click.FloatRange(0, 10),
        default=0.0,
        show_default=True,
        metavar="SECONDS",
        help="Wait for others.",
    ),
    click.option(
        "--replicas",
        type=click.IntRange(1, 64),
        default=1,
        show_default=True,
        metavar="N",
        help="Processes with the model.",
    ),
    click.option(
        "--gpus",
        type=click.FloatRange(0, 16),
        default=0.0,
        show_default=True,
        metavar="N",
        help="GPUs of a replica; 0.5 shares.",
    ),
)
"""Adds the options of a served model; the command gets `ServingOptions` as `options`."""


@click.command(
    cls=Command,
    examples={
        "cloudtrain serve 71810a": "at a free port",
        "cloudtrain serve 71810a --checkpoint best --port 8080": "its best weights",
    },
)
@run_argument
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    metavar="N",
    help="Port; a free one by default.",
)
@serving_options
@click.option(
    "--log",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="The server's log; temporary by default.",
)
@json_option
def serve(run: str, port: int | None, options: object, log: Path | None, as_json: bool) -> int:
    """Serve a run's model on this machine: GET /ping and POST /invocations, as a SageMaker endpoint does.

    It needs the extra `serve`; without it the command prints how to install it. The server listens on 127.0.0.1
    only. With --json the first line is {"url": ...}. Ctrl-C ends it.
    """
    from cloudtrain.features.serving import served_run

    with served_run.ended_by_signals(), console.spinner("loading the model"):
        server = served_run.serve(run, options=options, port=port, log=log)  # type: ignore[arg-type]
    with server:
        # Before the address is printed: who has read it may end the server at once.
        ended = served_run.catch_end()
        console.print_answer(
            lambda: {"url": server.url}, lambda: console.print_text(server.url), as_json=as_json
        )
        return served_run.wait_for_end(server, ended)


def _parse_pair(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+):(\d+)", text)
    if found is None:
        raise ValueError(f"expected two numbers such as 1:4, got {text!r}")
    return int(found[1]), int(found[2])


def _parse_memory(text: str) -> tuple[int, int]:
    memory, concurrency = _parse_pair(text if ":" in text else f"{text}:5")
    if memory not in range(1024, 6145, 1024):
        raise ValueError(f"AWS offers 1024, 2048, 3072, 4096, 5120 and 6144 MB, got {memory}")
    return memory, concurrency


def _build(**values: object) -> object:
    from cloudtrain.features.serving.endpoint_request import EndpointOptions

    return EndpointOptions(**values)  # type: ignore[arg-type]


_endpoint_options = option_group(
    "endpoint",
    _build,
    click.option("--name", metavar="NAME", help="Name of the endpoint; by default the run id."),
    click.option(
        "--instance-type",
        default="ml.m5.xlarge",
        show_default=True,
        metavar="TYPE",
        help="Type of its instances.",
    ),
    click.option(
        "--instances",
        type=click.IntRange(min=1),
        default=1,
        show_default=True,
        metavar="N",
        help="Number of instances.",
    ),
    click.option(
        "--serverless",
        callback=parsed_by(_parse_memory),
        metavar="MB[:N]",
        help="Serverless: memory, and most requests at once (5).",
    ),
    click.option(
        "--autoscale",
        "scaling",
        callback=parsed_by(_parse_pair),
        metavar="MIN:MAX",
        help="Let the load decide the number of instances.",
    ),
    click.option(
        "--target-invocations",
        type=click.IntRange(min=1),
        default=100,
        show_default=True,
        metavar="N",
        help="Goal per minute and instance.",
    ),
    click.option("--ami", metavar="NAME", help="InferenceAmiVersion; on GPUs the image's own."),
    click.option(
        "--image", metavar="URI", help="Image; by default AWS's of Ray Serve, or of vLLM."
    ),
    click.option(
        "--engine",
        type=click.Choice(["ray", "vllm"]),
        default="ray",
        show_default=True,
        help="vllm: Hugging Face's layout.",
    ),
    click.option("--skip-check", is_flag=True, help="Do not check permissions and quotas first."),
)


@click.command(
    cls=Command,
    examples={
        "cloudtrain deploy 71810a --plan": "requests and price",
        "cloudtrain deploy 71810a --name digits --serverless 2048": "create it",
    },
)
@run_argument
@_endpoint_options
@serving_options
@click.option(
    "--sample",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Request to send: .json, .npy, .png or .jpg.",
)
@click.option("--sandbox", is_flag=True, help="Deploy to the sandbox of this machine; free.")
@click.option("--plan", is_flag=True, help="Show requests, price and checks; create nothing.")
@profile_option
@trust_option
@json_option
def deploy(
    run: str,
    endpoint: EndpointOptions,
    options: ServingOptions,
    sample: Path | None,
    sandbox: bool,
    plan: bool,
    as_json: bool,
) -> None:
    """Create a SageMaker endpoint for a run's model, wait for it, and send one request.

    An endpoint with instances costs money until `cloudtrain undeploy`. A repeated deploy creates no second one.
    """
    from cloudtrain.console.plans import StepObserver
    from cloudtrain.features.serving.deployment import deploy as start

    with StepObserver("looking for the run") as observer:
        done = start(
            run,
            endpoint,
            serving=options,
            sandbox=sandbox,
            plan=plan,
            sample=sample,
            observer=observer,
        )
    console.print_answer(
        done.to_json, lambda: shown.print_deployment(done, is_plan=plan), as_json=as_json
    )


@click.command(
    cls=Command,
    examples={
        "cloudtrain undeploy digits": "in the account",
        "cloudtrain undeploy digits --sandbox": "in the sandbox",
    },
)
@click.argument("name", metavar="NAME")
@click.option("--sandbox", is_flag=True, help="In the sandbox of this machine.")
@profile_option
@trust_option
@json_option
def undeploy(name: str, sandbox: bool, as_json: bool) -> None:
    """Delete an endpoint with its scaling, configuration and model. The package in S3 is kept."""
    from cloudtrain.console.plans import StepObserver
    from cloudtrain.features.serving.deployment import undeploy as end

    with StepObserver(f"deleting {name}") as observer:
        deleted = end(name, sandbox=sandbox, observer=observer)
    content = {"endpoint": name, "deleted": list(deleted)}
    console.print_answer(lambda: content, lambda: shown.print_deleted(deleted), as_json=as_json)


def list_endpoints(only: str | None, idle_seconds: int, *, as_json: bool) -> None:
    """Print the endpoints that exist, with their price and whether they are used: `list --endpoints`."""
    from cloudtrain.client.account import find_settings
    from cloudtrain.errors import SettingsError
    from cloudtrain.features.serving.endpoints import list_endpoints as find

    places = listed_backends(only)
    if any(facts_of(each).is_billed for each in places or BACKENDS):
        missing = ", ".join(find_settings().missing)
        if missing and places is not None:
            raise SettingsError(f"settings are missing: {missing}", "cloudtrain configure")
        if missing:
            console.print_message(
                f"the account was not asked for endpoints: settings are missing: {missing}"
            )
    with console.spinner("looking for endpoints"):
        found = find(idle_seconds, backend=places)
    content = {"endpoints": [each.to_json() for each in found]}
    console.print_answer(
        lambda: content, lambda: shown.print_endpoints(found, idle_seconds), as_json=as_json
    )
