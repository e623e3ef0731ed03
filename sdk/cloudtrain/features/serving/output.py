"""Output about endpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cloudtrain import console
from cloudtrain.console.facts import print_facts
from cloudtrain.console.tables import Cell, Column, print_table
from cloudtrain.support.backend_facts import backend_option, facts_of
from cloudtrain.support.units import format_duration, format_usd
from cloudtrain_runtime.contract.strict_json import dump_json

if TYPE_CHECKING:
    from cloudtrain.features.serving.deployment import Deployment
    from cloudtrain.features.serving.endpoints import Endpoint


def print_deployment(found: Deployment, *, is_plan: bool) -> None:
    """Print an endpoint, or what a deploy would send."""
    if is_plan:
        console.print_text(dump_json(found.requests.to_json(), indent=2))
    rows = [("endpoint", found.name), ("place", found.backend), ("price", _price(found))]
    rows += [("check", each) for each in found.checks]
    if found.answer:
        rows.append(("answer", found.answer[:200]))
    print_facts(rows)
    if not is_plan:
        where = backend_option(found.backend)
        console.print_message(
            f"to delete it: {console.command_name()} undeploy {found.name}{where}"
        )


def print_deleted(deleted: Sequence[str]) -> None:
    """Print what was deleted."""
    console.print_text("\n".join(f"deleted {each}" for each in deleted))


def print_endpoints(found: Sequence[Endpoint], idle_seconds: float) -> None:
    """Print endpoints, one per line, and which of them are idle."""
    print_table(_COLUMNS, [_row(each) for each in found], colours=_COLOURS)
    for each in found:
        if each.is_idle:
            where = backend_option(each.backend)
            console.print_message(
                f"{each.name}: no invocation for {format_duration(idle_seconds)}; "
                f"to delete it: {console.command_name()} undeploy {each.name}{where}"
            )
    if not found:
        console.print_message("there is no endpoint")


def _row(each: Endpoint) -> tuple[str | Cell, ...]:
    if not facts_of(each.backend).is_billed:
        price = Cell("free")
    elif each.usd_per_hour is None:
        price = Cell("price unknown", shown="unknown")
    else:
        price = Cell(f"{format_usd(each.usd_per_hour)} per hour", shown=f"{each.usd_per_hour:,.2f}")
    used = Cell("use unknown", shown="unknown")
    if each.invocations is not None:
        used = Cell(f"{each.invocations} invocations", shown=f"{each.invocations:,}")
    return each.name, each.backend, str(each.status), each.capacity, price, used


_COLUMNS = (
    Column("endpoint", least=30),
    Column("place", drop=1),
    Column("state"),
    Column("capacity", drop=2),
    Column("price", title="USD/HOUR", is_number=True),
    Column("use", title="REQUESTS", is_number=True, drop=3),
)
_COLOURS = {"InService": "32", "Failed": "1;31", "Creating": "36", "Updating": "36"}


def _price(found: Deployment) -> str:
    if not facts_of(found.backend).is_billed:
        return "none in the sandbox"
    variant = found.requests.config["ProductionVariants"][0]
    if "ServerlessConfig" in variant:
        return "per request; a serverless endpoint costs nothing while it is idle"
    if found.usd_per_hour is None:
        return (
            f"unknown for {variant['InstanceType']}: https://aws.amazon.com/sagemaker/ai/pricing/"
        )
    return f"{format_usd(found.usd_per_hour)} per hour"
