"""Checks of the file systems that a job mounts: they exist, and its subnets and security groups reach them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cloudtrain.aws.errors import SuppressCodes
from cloudtrain.planning.plan import Plan
from cloudtrain.preflight.base import CheckContext, UnansweredError, command
from cloudtrain.preflight.network import find_resources
from cloudtrain.support.checks import Check, failed, passed

_SOURCE = "FileSystemDataSource"
_PORTS = {"FSxLustre": 988, "EFS": 2049}
"""Ports of Lustre and NFS. Sources: FSx for Lustre and EFS user guides, security groups, 2026-11."""

Document = Mapping[str, Any]


def mounted_channels(plan: Plan) -> list[Document]:
    """Return the channels of a plan that mount a file system."""
    return [
        channel for channel in plan.request["InputDataConfig"] if _SOURCE in channel["DataSource"]
    ]


def check_file_system(channel: Document, context: CheckContext) -> Iterator[Check]:
    """Check the file system that a channel mounts."""
    name = f"data.{channel['ChannelName']}"
    source = channel["DataSource"][_SOURCE]
    check = _check_lustre if source["FileSystemType"] == "FSxLustre" else _check_efs
    with SuppressCodes(("FileSystemNotFound",)):
        yield check(context, name, source)
        return
    yield _missing(context, name, source)


def _missing(context: CheckContext, name: str, source: Document) -> Check:
    service = "fsx" if source["FileSystemType"] == "FSxLustre" else "efs"
    see = command("aws", service, "describe-file-systems", "--region", context.region)
    return failed(
        name,
        f"there is no file system {source['FileSystemId']} in {context.region}",
        f"list them: {see}",
    )


def _check_lustre(context: CheckContext, name: str, source: Document) -> Check:
    file_system = source["FileSystemId"]
    found = context.client("fsx").describe_file_systems(FileSystemIds=[file_system])["FileSystems"]
    if not found:
        return _missing(context, name, source)
    kind = found[0]["FileSystemType"]
    lustre = found[0].get("LustreConfiguration", {})
    if kind != "LUSTRE":
        return failed(
            name,
            f"{file_system} is of type {kind}, and SageMaker mounts LUSTRE",
            "use another file system",
        )
    mount = f"/{lustre['MountName']}" if "MountName" in lustre else None
    path = str(source["DirectoryPath"])
    if mount is not None and path != mount and not path.startswith(f"{mount}/"):
        detail = f"{path} is not below {mount}, where {file_system} is mounted"
        return failed(name, detail, f"--set {name}.path={mount}{path}")
    interfaces = found[0].get("NetworkInterfaceIds", [])
    groups: list[str] = []
    if interfaces:
        described = context.client("ec2").describe_network_interfaces(
            NetworkInterfaceIds=interfaces[:1]
        )
        groups = [group["GroupId"] for group in described["NetworkInterfaces"][0]["Groups"]]
    return _check_reach(context, name, source, found[0].get("SubnetIds", []), groups)


def _check_efs(context: CheckContext, name: str, source: Document) -> Check:
    efs = context.client("efs")
    file_system = source["FileSystemId"]
    targets = efs.describe_mount_targets(FileSystemId=file_system)["MountTargets"]
    if not targets:
        make = command(
            "aws",
            "efs",
            "create-mount-target",
            "--file-system-id",
            file_system,
            "--subnet-id",
            "SUBNET",
        )
        return failed(name, f"{file_system} has no mount target, so no instance can reach it", make)
    target = targets[0]["MountTargetId"]
    groups = efs.describe_mount_target_security_groups(MountTargetId=target)["SecurityGroups"]
    return _check_reach(context, name, source, [each["SubnetId"] for each in targets], groups)


def _check_reach(
    context: CheckContext, name: str, source: Document, places: Sequence[str], groups: Sequence[str]
) -> Check:
    """Check that the job's subnets are in the file system's VPC, and that its groups allow the job's groups."""
    network = context.plan.request["VpcConfig"]
    file_system = source["FileSystemId"]
    theirs, _ = find_resources(context, "subnets", places)
    ours, _ = find_resources(context, "subnets", network["Subnets"])
    if not theirs or not ours:
        raise UnansweredError("needs the subnets of the job and of the file system")
    vpcs = {str(subnet["VpcId"]) for subnet in ours}
    vpc = str(theirs[0]["VpcId"])
    if vpcs != {vpc}:
        detail = f"{file_system} is in {vpc}, the job's subnets are in {', '.join(sorted(vpcs))}"
        return failed(name, detail, f"name subnets and security groups of {vpc} in cluster.network")
    port = _PORTS[source["FileSystemType"]]
    found, _ = find_resources(context, "security_groups", groups)
    if found and not any(_allows(group, port, network["SecurityGroupIds"]) for group in found):
        group = found[0]["GroupId"]
        own = network["SecurityGroupIds"][0]
        allow = command(
            *(
                "aws",
                "ec2",
                "authorize-security-group-ingress",
                "--group-id",
                group,
                "--protocol",
                "tcp",
            ),
            *("--port", port, "--source-group", own, "--region", context.region),
        )
        return failed(
            name, f"{group} of {file_system} does not allow port {port} from {own}", allow
        )
    zones = {subnet.get("AvailabilityZone") for subnet in theirs}
    other = sorted(
        {str(subnet.get("AvailabilityZone")) for subnet in ours} - {str(zone) for zone in zones}
    )
    where = f"{source['FileSystemType']} {file_system}, folder {source['DirectoryPath']}, in {vpc}"
    if other and source["FileSystemType"] == "FSxLustre":
        where += (
            f"; instances in {', '.join(other)} read it across zones, which is slower and billed"
        )
    return passed(name, where)


def _allows(group: Document, port: int, sources: Sequence[str]) -> bool:
    """Whether a security group allows traffic to a port from one of these groups, or from addresses."""
    for rule in group.get("IpPermissions", []):
        has_port = rule.get("IpProtocol") == "-1" or rule.get("FromPort", 0) <= port <= rule.get(
            "ToPort", 65535
        )
        named = [pair["GroupId"] for pair in rule.get("UserIdGroupPairs", [])]
        if has_port and (rule.get("IpRanges") or not set(named).isdisjoint(sources)):
            return True
    return False
