"""Checks of subnets, security groups, and the routes to S3 and PyPI."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cloudtrain import catalog
from cloudtrain.planning.plan import Plan
from cloudtrain.preflight.base import (
    Account,
    CheckContext,
    UnansweredError,
    command,
    map_concurrently,
)
from cloudtrain.support.checks import Check, failed, passed, unknown
from cloudtrain.support.notebook.summary import count
from cloudtrain_runtime.contract.aws_codes import code_of

_ADDRESSES_PER_INSTANCE = 2
_ADDRESSES_PER_EFA_INSTANCE = 5
# Private addresses. Source: SageMaker developer guide, training jobs in a VPC, 2026-11.

_INDEX_VARIABLES = (
    "PIP_INDEX_URL",
    "PIP_FIND_LINKS",
    "PIP_NO_INDEX",
    "PIP_CONFIG_FILE",
    "HTTPS_PROXY",
    "https_proxy",
)
"""Variables of a job with which pip needs no way to PyPI of its own."""

Document = Mapping[str, Any]


def check_network(context: CheckContext) -> Iterator[Check]:
    """Check the plan's network, if it has one."""
    config = context.plan.request.get("VpcConfig")
    if config is None:
        yield passed("network", "SageMaker's own network: the job names no subnets")
        return
    subnets, missing = find_resources(context, "subnets", config["Subnets"])
    yield _check_subnets_exist(context, subnets, missing) or _check_addresses(context, subnets)
    groups, lost = find_resources(context, "security_groups", config["SecurityGroupIds"])
    yield _check_groups_exist(context, groups, lost, subnets) or _check_self_reference(
        context, groups
    )
    if not subnets:
        raise UnansweredError("needs the subnets")
    of_vpc = [{"Name": "vpc-id", "Values": [str(subnets[0]["VpcId"])]}]
    tables = context.client("ec2").describe_route_tables(Filters=of_vpc)["RouteTables"]
    yield _check_route_to_s3(context, subnets, tables)
    if needs_way_to_pypi(context.plan):
        yield _check_route_to_pypi(context, subnets, tables)


def needs_way_to_pypi(plan: Plan) -> bool:
    """Whether pip installs requirements in a network of the user's. SageMaker's own network reaches PyPI."""
    return "VpcConfig" in plan.request and plan.config.requirements is not None


def check_network_settings(account: Account) -> Iterator[Check]:
    """Check that the settings' subnets and security groups exist and belong to one VPC. This needs no job."""
    subnets, missing = find_resources(account, "subnets", account.settings.subnets)
    detail = ""
    if subnets:
        detail = f"{count(len(subnets), 'subnet')} of {subnets[0]['VpcId']}"
    yield _check_subnets_exist(account, subnets, missing) or passed("subnets", detail)
    groups, lost = find_resources(account, "security_groups", account.settings.security_groups)
    fine = passed("security groups", f"{count(len(groups), 'group')} in the subnets' VPC")
    yield _check_groups_exist(account, groups, lost, subnets) or fine


def find_resources(
    context: Account, kind: str, names: Sequence[str]
) -> tuple[list[Document], list[str]]:
    """Return the resources with these ids, and the missing ids. One call each, because a missing id fails a call."""
    from botocore.exceptions import ClientError

    ec2 = context.client("ec2")

    def describe(name: str) -> Document | None:
        try:
            if kind == "subnets":
                return dict(ec2.describe_subnets(SubnetIds=[name])["Subnets"][0])
            return dict(ec2.describe_security_groups(GroupIds=[name])["SecurityGroups"][0])
        except ClientError as error:
            if not code_of(error).endswith((".Malformed", "NotFound")):
                raise
            return None

    found = map_concurrently(describe, names)
    missing = [name for name, each in zip(names, found, strict=True) if each is None]
    return [each for each in found if each is not None], missing


def _check_addresses(context: CheckContext, subnets: Sequence[Document]) -> Check:
    vpc = str(subnets[0]["VpcId"])
    free = sum(int(subnet["AvailableIpAddressCount"]) for subnet in subnets)
    each = _ADDRESSES_PER_EFA_INSTANCE if _has_efa(context) else _ADDRESSES_PER_INSTANCE
    needed = context.most_instances * each
    detail = (
        f"{free} free addresses in {count(len(subnets), 'subnet')} of {vpc}, the job needs {needed}"
    )
    if free >= needed:
        return passed("subnets", detail)
    make = (
        "aws",
        "ec2",
        "create-subnet",
        "--vpc-id",
        vpc,
        "--cidr-block",
        "CIDR",
        "--region",
        context.region,
    )
    return failed("subnets", detail, f"name more subnets, or create a larger one: {command(*make)}")


def _check_subnets_exist(
    context: Account, subnets: Sequence[Document], missing: Sequence[str]
) -> Check | None:
    if missing:
        look = command(
            *("aws", "ec2", "describe-subnets", "--region", context.region),
            *("--query", "Subnets[].[SubnetId,VpcId,AvailableIpAddressCount]", "--output", "table"),
        )
        detail = f"{count(len(missing), 'subnet')} not in {context.region}: {', '.join(missing)}"
        return failed(
            "subnets",
            detail,
            f"correct CLOUDTRAIN_SUBNETS or cluster.network.subnets; list them: {look}",
        )
    vpcs = sorted({str(subnet["VpcId"]) for subnet in subnets})
    if len(vpcs) > 1:
        detail = f"the subnets are in {len(vpcs)} VPCs: {', '.join(vpcs)}"
        return failed(
            "subnets",
            detail,
            "name subnets of one VPC in CLOUDTRAIN_SUBNETS or cluster.network.subnets",
        )
    return None


def _has_efa(context: CheckContext) -> bool:
    found = [catalog.find_instance(name) for name in context.instance_types]
    return any(instance is not None and instance.efa for instance in found)


def _check_groups_exist(
    context: Account,
    groups: Sequence[Document],
    missing: Sequence[str],
    subnets: Sequence[Document],
) -> Check | None:
    """Return a failure if a group does not exist, or does not belong to the subnets' VPC."""
    name = "security groups"
    if missing:
        look = command(
            *("aws", "ec2", "describe-security-groups", "--region", context.region),
            *("--query", "SecurityGroups[].[GroupId,VpcId,GroupName]", "--output", "table"),
        )
        detail = f"{count(len(missing), 'group')} not in {context.region}: {', '.join(missing)}"
        return failed(
            name,
            detail,
            f"correct CLOUDTRAIN_SECURITY_GROUPS or cluster.network; list them: {look}",
        )
    vpcs = {subnet["VpcId"] for subnet in subnets}
    outside = [group["GroupId"] for group in groups if vpcs and group["VpcId"] not in vpcs]
    if outside:
        detail = f"{', '.join(outside)}: not in the subnets' VPC {', '.join(sorted(vpcs))}"
        return failed(
            name,
            detail,
            "name groups of the subnets' VPC in CLOUDTRAIN_SECURITY_GROUPS or cluster.network",
        )
    return None


def _check_self_reference(context: CheckContext, groups: Sequence[Document]) -> Check:
    """Check that instances can reach each other: with EFA a group must allow all traffic from and to itself.

    Source: EC2 user guide, EFA security groups; SageMaker developer guide, training jobs in a VPC, 2026-11.
    """
    name = "security groups"
    ids = ", ".join(str(group["GroupId"]) for group in groups)
    if context.most_instances == 1:
        return passed(name, f"{ids}: in the subnets' VPC; one instance needs no rule")
    # EFA traffic does not use IP addresses, so a rule for an address range does not allow it.
    efa = _has_efa(context)
    lacking = [_closed_directions(group, by_address=not efa) for group in groups]
    if not all(lacking):
        return passed(name, f"{ids}: all traffic between the instances is allowed")
    first = str(groups[0]["GroupId"])
    directions = lacking[0]
    fabric = "EFA needs" if efa else "ranks on several instances need"
    detail = f"{first} does not allow all traffic with itself ({' and '.join(directions)}), which {fabric}"
    commands = [
        command(
            *("aws", "ec2", f"authorize-security-group-{direction}", "--group-id", first),
            *(
                "--ip-permissions",
                f"IpProtocol=-1,UserIdGroupPairs=[{{GroupId={first}}}]",
                "--region",
                context.region,
            ),
        )
        for direction in directions
    ]
    return failed(name, detail, " && ".join(commands))


def _closed_directions(group: Document, *, by_address: bool) -> list[str]:
    """Return the directions, ingress and egress, in which a group does not allow all traffic with itself."""

    def is_open(rule: Document) -> bool:
        has_itself = any(
            pair.get("GroupId") == group["GroupId"] for pair in rule.get("UserIdGroupPairs", [])
        )
        has_any_address = any(
            entry.get("CidrIp") == "0.0.0.0/0" for entry in rule.get("IpRanges", [])
        )
        return rule.get("IpProtocol") == "-1" and (has_itself or (by_address and has_any_address))

    directions = (("ingress", "IpPermissions"), ("egress", "IpPermissionsEgress"))
    return [
        direction for direction, rules in directions if not any(map(is_open, group.get(rules, [])))
    ]


def _check_route_to_s3(
    context: CheckContext, subnets: Sequence[Document], tables: Sequence[Document]
) -> Check:
    """Check that every subnet has a route to S3, where data, code and checkpoints are."""
    name = "way to s3"
    vpc = str(subnets[0]["VpcId"])
    service = f"com.amazonaws.{context.region}.s3"
    ec2 = context.client("ec2")
    of_vpc = {"Name": "vpc-id", "Values": [vpc]}
    of_service = {"Name": "service-name", "Values": [service]}
    endpoints = ec2.describe_vpc_endpoints(Filters=[of_vpc, of_service])["VpcEndpoints"]
    if any(endpoint.get("VpcEndpointType") == "Interface" for endpoint in endpoints):
        return passed(name, f"an interface endpoint of S3 in {vpc}")
    routed = {table for endpoint in endpoints for table in endpoint.get("RouteTableIds", [])}
    table_of = {
        str(subnet["SubnetId"]): _table_of(str(subnet["SubnetId"]), tables) for subnet in subnets
    }
    routes = {
        subnet: "gateway endpoint" if table.get("RouteTableId") in routed else _way_out(table)
        for subnet, table in table_of.items()
    }
    table_ids = sorted({table.get("RouteTableId", "") for table in table_of.values()} - {""})
    fix = command(
        *("aws", "ec2", "create-vpc-endpoint", "--vpc-id", vpc, "--service-name", service),
        *("--route-table-ids", *table_ids, "--region", context.region),
    )
    if isolated := [subnet for subnet, route in routes.items() if route == ""]:
        return failed(
            name,
            f"no route from {', '.join(isolated)} to S3: neither an endpoint nor a NAT gateway",
            fix,
        )
    if public := [subnet for subnet, route in routes.items() if route == "internet gateway"]:
        detail = f"{', '.join(public)}: an internet gateway only, but the job's interfaces have no public address"
        return unknown(name, detail, fix)
    return passed(name, ", ".join(f"{subnet} by {route}" for subnet, route in routes.items()))


def _table_of(subnet: str, tables: Sequence[Document]) -> Document:
    """Return a subnet's own route table, or the VPC's main one."""
    main: Document = {}
    for table in tables:
        for association in table.get("Associations", []):
            if association.get("SubnetId") == subnet:
                return table
            if association.get("Main"):
                main = table
    return main


def _check_route_to_pypi(
    context: CheckContext, subnets: Sequence[Document], tables: Sequence[Document]
) -> Check:
    """Check that pip can download the requirements from every subnet: from PyPI, or from the job's own index."""
    name = "way to pypi"
    plan = context.plan
    routes = {
        str(subnet["SubnetId"]): _way_out(_table_of(str(subnet["SubnetId"]), tables))
        for subnet in subnets
    }
    isolated = [subnet for subnet, route in routes.items() if route in ("", "internet gateway")]
    if not isolated:
        return passed(name, ", ".join(f"{subnet} by {route}" for subnet, route in routes.items()))
    fix = (
        "give the subnets a NAT gateway; or name a CodeArtifact repository in code.env.PIP_INDEX_URL; or put wheels "
        "into the code folder and write --no-index and --find-links wheels into the requirements; or use an image "
        "that has the packages (cluster.image) and remove code.requirements"
    )
    detail = f"{', '.join(isolated)}: no NAT gateway, so pip cannot reach PyPI for {plan.config.requirements}"
    own = [
        each
        for each in _INDEX_VARIABLES
        if each in plan.request.get("Environment", {}) or each in plan.config.secrets
    ]
    if own:
        return unknown(
            name, f"{detail}; whether it reaches what {', '.join(own)} names is unknown", fix
        )
    if not plan.bundle.requirements.needs_pypi:
        return unknown(name, f"{detail}, which may name sources of its own", fix)
    if plan.job_document.get("cluster", {}).get("image") is not None:
        return unknown(name, f"{detail}, but the image may have its packages", fix)
    return failed(name, detail, fix)


def _way_out(table: Document) -> str:
    """Return how a route table leads to the internet, or an empty string."""
    for route in table.get("Routes", []):
        if route.get("DestinationCidrBlock") != "0.0.0.0/0" or route.get("State") == "blackhole":
            continue
        if str(route.get("GatewayId", "")).startswith("igw-"):
            return "internet gateway"
        return "NAT gateway" if route.get("NatGatewayId") else "default route"
    return ""
