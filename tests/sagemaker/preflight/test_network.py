"""Checks of subnets, security groups, and the routes to S3 and PyPI."""

from __future__ import annotations

import shlex

import pytest
from support.aws_frontend import Front
from support.preflight import Checks, client, only_failure

from cloudtrain.support.checks import Result

pytestmark = pytest.mark.aws


class Vpc:
    """A VPC in moto with a subnet and a security group; methods add what a test needs."""

    def __init__(self) -> None:
        self.ec2 = client("ec2")
        self.id = self.ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
        self.subnet = self.add_subnet("10.0.0.0/24")
        self.group = self.ec2.create_security_group(
            GroupName="training", Description="x", VpcId=self.id
        )["GroupId"]
        tables = self.ec2.describe_route_tables(Filters=[{"Name": "vpc-id", "Values": [self.id]}])[
            "RouteTables"
        ]
        self.table = tables[0]["RouteTableId"]

    def add_subnet(self, block: str) -> str:
        return str(self.ec2.create_subnet(VpcId=self.id, CidrBlock=block)["Subnet"]["SubnetId"])

    def add_endpoint(self) -> None:
        self.ec2.create_vpc_endpoint(
            VpcId=self.id, ServiceName="com.amazonaws.us-west-2.s3", RouteTableIds=[self.table]
        )

    def allow_itself(self, *directions: str) -> None:
        rule = [{"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": self.group}]}]
        for direction in directions:
            getattr(self.ec2, f"authorize_security_group_{direction}")(
                GroupId=self.group, IpPermissions=rule
            )

    def override(self, *, subnet: str = "", group: str = "") -> str:
        return f"cluster.network={{subnets: [{subnet or self.subnet}], security_groups: [{group or self.group}]}}"


@pytest.fixture
def vpc(account: Front) -> Vpc:
    return Vpc()


def test_a_correct_network_passes(vpc: Vpc, checks: Checks) -> None:
    vpc.add_endpoint()
    vpc.allow_itself("ingress", "egress")
    found = checks(vpc.override(), "cluster.instance_type=ml.p4d.24xlarge")
    assert [str(found[name].result) for name in ("subnets", "security groups", "way to s3")] == [
        "pass"
    ] * 3
    assert "251 free addresses in 1 subnet of vpc-" in found["subnets"].detail
    assert "the job needs 10" in found["subnets"].detail
    assert "gateway endpoint" in found["way to s3"].detail


def test_a_subnet_and_a_group_that_are_missing(vpc: Vpc, checks: Checks) -> None:
    vpc.add_endpoint()
    vpc.allow_itself("ingress", "egress")
    failure = only_failure(checks(vpc.override(subnet="subnet-00000009")), "subnets")
    assert "subnet-00000009" in failure.detail
    assert "aws ec2 describe-subnets" in failure.fix
    failure = only_failure(checks(vpc.override(group="sg-00000009")), "security groups")
    assert "aws ec2 describe-security-groups" in failure.fix


def test_a_group_without_reference_to_itself(vpc: Vpc, checks: Checks) -> None:
    vpc.add_endpoint()
    efa = (vpc.override(), "cluster.instance_type=ml.p4d.24xlarge")
    fix = only_failure(checks(*efa), "security groups").fix
    assert fix.count(" && ") == 1
    assert f"authorize-security-group-ingress --group-id {vpc.group}" in fix
    assert f"IpProtocol=-1,UserIdGroupPairs=[{{GroupId={vpc.group}}}]" in fix
    vpc.allow_itself("ingress")
    # EFA needs a rule for the group itself. Without EFA, the default rule for outbound traffic is enough.
    assert "egress" in only_failure(checks(*efa), "security groups").fix
    assert checks(vpc.override())["security groups"].result is Result.PASS
    assert checks(*efa, "cluster.instances=1")["security groups"].result is Result.PASS
    vpc.allow_itself("egress")
    assert checks(*efa)["security groups"].result is Result.PASS


def test_a_group_of_another_network(vpc: Vpc, checks: Checks) -> None:
    vpc.add_endpoint()
    assert (
        "not in the subnets' VPC"
        in only_failure(checks(vpc.override(group=Vpc().group)), "security groups").detail
    )


def test_too_few_addresses(vpc: Vpc, checks: Checks) -> None:
    vpc.add_endpoint()
    vpc.allow_itself("ingress", "egress")
    small = vpc.add_subnet("10.0.9.0/28")  # 11 free: AWS keeps five
    found = checks(vpc.override(subnet=small), "cluster.instances=6")
    assert "11 free addresses in 1 subnet" in only_failure(found, "subnets").detail


def test_no_route_to_s3(vpc: Vpc, checks: Checks) -> None:
    vpc.allow_itself("ingress", "egress")
    fix = only_failure(checks(vpc.override()), "way to s3").fix
    words = shlex.split(fix)
    assert words[:3] == ["aws", "ec2", "create-vpc-endpoint"]
    assert words[words.index("--route-table-ids") + 1] == vpc.table
    gateway = vpc.ec2.create_internet_gateway()["InternetGateway"]["InternetGatewayId"]
    vpc.ec2.attach_internet_gateway(InternetGatewayId=gateway, VpcId=vpc.id)
    vpc.ec2.create_route(
        RouteTableId=vpc.table, DestinationCidrBlock="0.0.0.0/0", GatewayId=gateway
    )
    assert checks(vpc.override())["way to s3"].result is Result.UNKNOWN
    vpc.ec2.delete_route(RouteTableId=vpc.table, DestinationCidrBlock="0.0.0.0/0")
    nat = vpc.ec2.create_nat_gateway(SubnetId=vpc.subnet)["NatGateway"]["NatGatewayId"]
    vpc.ec2.create_route(RouteTableId=vpc.table, DestinationCidrBlock="0.0.0.0/0", NatGatewayId=nat)
    assert "by NAT gateway" in checks(vpc.override())["way to s3"].detail


def test_packages_need_a_way_to_pypi(vpc: Vpc, checks: Checks) -> None:
    vpc.add_endpoint()
    vpc.allow_itself("ingress", "egress")
    install = (vpc.override(), "code.requirements=requirements.txt")
    assert "way to pypi" not in checks(vpc.override())
    assert "way to pypi" not in checks("code.requirements=requirements.txt", requirements="einops")
    failure = only_failure(
        checks(*install, requirements="# models\neinops==0.8.1\n"), "way to pypi"
    )
    assert (
        failure.detail
        == f"{vpc.subnet}: no NAT gateway, so pip cannot reach PyPI for requirements.txt"
    )
    for remedy in ("NAT gateway", "CodeArtifact", "--find-links wheels", "cluster.image"):
        assert remedy in failure.fix
    nat = vpc.ec2.create_nat_gateway(SubnetId=vpc.subnet)["NatGateway"]["NatGatewayId"]
    vpc.ec2.create_route(RouteTableId=vpc.table, DestinationCidrBlock="0.0.0.0/0", NatGatewayId=nat)
    found = checks(*install, requirements="einops")["way to pypi"]
    assert (found.result, found.detail) == (Result.PASS, f"{vpc.subnet} by NAT gateway")


IMAGE = "cluster.image=123456789012.dkr.ecr.us-west-2.amazonaws.com/train:1"


@pytest.mark.parametrize(
    ("override", "requirements", "detail"),
    [
        (
            "code.env={PIP_INDEX_URL: 'https://packages.example'}",
            "einops",
            "what PIP_INDEX_URL names is unknown",
        ),
        (
            "name=demo",
            "--no-index\n--find-links wheels\neinops",
            "which may name sources of its own",
        ),
        (
            "name=demo",
            "./wheels/einops-0.8.1-py3-none-any.whl",
            "which may name sources of its own",
        ),
        (IMAGE, "einops", "but the image may have its packages"),
    ],
)
def test_packages_from_elsewhere_are_no_failure(
    vpc: Vpc, checks: Checks, override: str, requirements: str, detail: str
) -> None:
    vpc.add_endpoint()
    vpc.allow_itself("ingress", "egress")
    found = checks(
        vpc.override(), "code.requirements=requirements.txt", override, requirements=requirements
    )
    assert found["way to pypi"].result is Result.UNKNOWN
    assert detail in found["way to pypi"].detail
