"""Checks of the file systems that a job mounts."""

from __future__ import annotations

from typing import Any

import pytest
from support.aws_frontend import Answer, Front
from support.preflight import Checks, client, only_failure

from cloudtrain.support.checks import Result

LUSTRE = "fs-0123456789abcdef0"


class Network:
    """A VPC with a subnet of the job's, a subnet of the file system's, and a security group of each."""

    def __init__(self, block: str = "10.0.0.0/16") -> None:
        self.ec2 = client("ec2")
        self.id = self.ec2.create_vpc(CidrBlock=block)["Vpc"]["VpcId"]
        self.subnet = self.add_subnet(block.replace("0.0/16", "1.0/24"))
        self.storage = self.add_subnet(block.replace("0.0/16", "2.0/24"))
        self.group, self.guard = self.add_group("jobs"), self.add_group("storage")
        (table,) = self.ec2.describe_route_tables(
            Filters=[{"Name": "vpc-id", "Values": [self.id]}]
        )["RouteTables"]
        service = "com.amazonaws.us-west-2.s3"
        self.ec2.create_vpc_endpoint(
            VpcId=self.id, ServiceName=service, RouteTableIds=[table["RouteTableId"]]
        )

    def add_subnet(self, block: str) -> str:
        zone = "us-west-2a"
        return str(
            self.ec2.create_subnet(VpcId=self.id, CidrBlock=block, AvailabilityZone=zone)["Subnet"][
                "SubnetId"
            ]
        )

    def add_group(self, name: str) -> str:
        return str(
            self.ec2.create_security_group(VpcId=self.id, GroupName=name, Description=name)[
                "GroupId"
            ]
        )

    def allow(self, port: int, source: str) -> None:
        rule = {
            "IpProtocol": "tcp",
            "FromPort": port,
            "ToPort": port,
            "UserIdGroupPairs": [{"GroupId": source}],
        }
        self.ec2.authorize_security_group_ingress(GroupId=self.guard, IpPermissions=[rule])

    def interface(self) -> str:
        made = self.ec2.create_network_interface(SubnetId=self.storage, Groups=[self.guard])
        return str(made["NetworkInterface"]["NetworkInterfaceId"])

    @property
    def overrides(self) -> tuple[str, ...]:
        network = f"cluster.network={{subnets: [{self.subnet}], security_groups: [{self.group}]}}"
        return ("cluster.instances=1", network)


@pytest.fixture
def network(account: Front) -> Network:
    return Network()


def serve_lustre(account: Front, network: Network, **changes: Any) -> None:
    """Serve one file system as FSx describes it; moto's has neither a mount name nor network interfaces."""
    found = {
        "FileSystemId": LUSTRE,
        "FileSystemType": "LUSTRE",
        "VpcId": network.id,
        "SubnetIds": [network.storage],
        "NetworkInterfaceIds": [network.interface()],
        "LustreConfiguration": {"MountName": "abcd"},
        **changes,
    }
    account.respond("DescribeFileSystems", Answer.json({"FileSystems": [found]}))


def test_a_lustre_file_system_that_the_job_reaches(
    account: Front, network: Network, checks: Checks
) -> None:
    serve_lustre(account, network)
    network.allow(988, network.group)
    found = checks(*network.overrides, f"data.train={{fsx: {LUSTRE}, path: /abcd/tokens}}")[
        "data.train"
    ]
    assert found.result is Result.PASS, found
    assert f"FSxLustre {LUSTRE}, folder /abcd/tokens, in {network.id}" in found.detail


def test_a_folder_outside_of_the_mount_name(
    account: Front, network: Network, checks: Checks
) -> None:
    serve_lustre(account, network)
    network.allow(988, network.group)
    found = checks(*network.overrides, f"data.train={{fsx: {LUSTRE}, path: /tokens}}")
    failure = only_failure(found, "data.train")
    assert f"/tokens is not below /abcd, where {LUSTRE} is mounted" in failure.detail
    assert failure.fix == "--set data.train.path=/abcd/tokens"


def test_a_security_group_without_lustres_port(
    account: Front, network: Network, checks: Checks
) -> None:
    serve_lustre(account, network)
    network.allow(22, network.group)
    failure = only_failure(
        checks(*network.overrides, f"data.train={{fsx: {LUSTRE}, path: /abcd}}"), "data.train"
    )
    assert (
        f"{network.guard} of {LUSTRE} does not allow port 988 from {network.group}"
        in failure.detail
    )
    assert (
        f"authorize-security-group-ingress --group-id {network.guard} --protocol tcp --port 988"
        in failure.fix
    )


def test_a_file_system_in_another_network(account: Front, network: Network, checks: Checks) -> None:
    other = Network("10.7.0.0/16")
    serve_lustre(account, other)
    failure = only_failure(
        checks(*network.overrides, f"data.train={{fsx: {LUSTRE}, path: /abcd}}"), "data.train"
    )
    assert f"{LUSTRE} is in {other.id}, the job's subnets are in {network.id}" in failure.detail
    assert other.id in failure.fix


def test_a_file_system_of_another_kind(account: Front, network: Network, checks: Checks) -> None:
    serve_lustre(account, network, FileSystemType="WINDOWS")
    failure = only_failure(
        checks(*network.overrides, f"data.train={{fsx: {LUSTRE}, path: /abcd}}"), "data.train"
    )
    assert "is of type WINDOWS, and SageMaker mounts LUSTRE" in failure.detail


def test_a_missing_file_system(account: Front, network: Network, checks: Checks) -> None:
    account.respond("DescribeFileSystems", Answer.json({"FileSystems": []}))
    failure = only_failure(
        checks(*network.overrides, f"data.train={{fsx: {LUSTRE}, path: /abcd}}"), "data.train"
    )
    assert f"there is no file system {LUSTRE} in us-west-2" in failure.detail
    assert failure.fix.startswith("list them: aws fsx describe-file-systems")


def test_an_efs_file_system(network: Network, checks: Checks) -> None:
    efs = client("efs")
    made = efs.create_file_system(CreationToken="tokens")["FileSystemId"]
    overrides = (*network.overrides, f"data.train={{efs: {made}}}")
    assert f"{made} has no mount target" in only_failure(checks(*overrides), "data.train").detail
    efs.create_mount_target(
        FileSystemId=made, SubnetId=network.storage, SecurityGroups=[network.guard]
    )
    assert "does not allow port 2049" in only_failure(checks(*overrides), "data.train").detail
    network.allow(2049, network.group)
    assert checks(*overrides)["data.train"].result is Result.PASS
    missing = (*network.overrides, "data.train={efs: fs-00000000}")
    failure = only_failure(checks(*missing), "data.train")
    assert "there is no file system fs-00000000" in failure.detail
    assert failure.fix.startswith("list them: aws efs describe-file-systems")
