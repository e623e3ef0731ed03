# A private network for the jobs, or their security group in an existing one.

locals {
  makes_vpc = var.existing_vpc == null
  # Sorted, so that the same zones get the same addresses.
  zones = local.makes_vpc ? (
    length(var.availability_zones) > 0 ? var.availability_zones : slice(sort(data.aws_availability_zones.available[0].names), 0, 2)
  ) : []

  vpc_id             = local.makes_vpc ? aws_vpc.this[0].id : var.existing_vpc.id
  subnet_ids         = local.makes_vpc ? [for zone in local.zones : aws_subnet.private[zone].id] : var.existing_vpc.subnets
  makes_group        = local.makes_vpc || length(try(var.existing_vpc.security_groups, [])) == 0
  security_group_ids = local.makes_group ? [aws_security_group.jobs[0].id] : var.existing_vpc.security_groups

  ec2_arn             = "arn:${local.partition}:ec2:${local.region}:${local.account}"
  subnet_arns         = [for id in local.subnet_ids : "${local.ec2_arn}:subnet/${id}"]
  security_group_arns = [for id in local.security_group_ids : "${local.ec2_arn}:security-group/${id}"]
}

data "aws_availability_zones" "available" {
  count = local.makes_vpc ? 1 : 0

  state = "available"
  filter {
    name   = "opt-in-status"
    values = ["opt-in-not-required"] # no Local Zones
  }
}

resource "aws_vpc" "this" {
  count = local.makes_vpc ? 1 : 0

  cidr_block           = var.vpc_cidr
  enable_dns_support   = true # both are needed so that AWS's host names resolve to the endpoints
  enable_dns_hostnames = true
  tags                 = merge(local.tags, { Name = var.name })
}

# Without rules, because no resource uses the default group.
resource "aws_default_security_group" "this" {
  count = local.makes_vpc ? 1 : 0

  vpc_id = aws_vpc.this[0].id
  tags   = merge(local.tags, { Name = "${var.name}-unused" })
}

resource "aws_subnet" "private" {
  for_each = toset(local.zones)

  vpc_id            = aws_vpc.this[0].id
  availability_zone = each.value
  # Each subnet has a sixteenth of the network; an instance with EFA needs five addresses.
  cidr_block = cidrsubnet(var.vpc_cidr, 4, index(local.zones, each.value))
  tags       = merge(local.tags, { Name = "${var.name}-private-${each.value}" })
}

resource "aws_route_table" "private" {
  count = local.makes_vpc ? 1 : 0

  vpc_id = aws_vpc.this[0].id
  tags   = merge(local.tags, { Name = "${var.name}-private" })
}

resource "aws_route_table_association" "private" {
  for_each = aws_subnet.private

  subnet_id      = each.value.id
  route_table_id = aws_route_table.private[0].id
}

resource "aws_security_group" "jobs" {
  count = local.makes_group ? 1 : 0

  name        = "${var.name}-jobs"
  description = "Hosts of training jobs: all traffic among themselves, HTTPS to AWS"
  vpc_id      = local.vpc_id
  tags        = merge(local.tags, { Name = "${var.name}-jobs" })
}

# EFA traffic has no IP addresses: only rules that name the group itself allow it, in both directions.
resource "aws_vpc_security_group_ingress_rule" "among_hosts" {
  count = local.makes_group ? 1 : 0

  security_group_id            = aws_security_group.jobs[0].id
  description                  = "NCCL, Gloo and EFA among the hosts of a job"
  ip_protocol                  = "-1"
  referenced_security_group_id = aws_security_group.jobs[0].id
}

resource "aws_vpc_security_group_egress_rule" "among_hosts" {
  count = local.makes_group ? 1 : 0

  security_group_id            = aws_security_group.jobs[0].id
  description                  = "NCCL, Gloo and EFA among the hosts of a job"
  ip_protocol                  = "-1"
  referenced_security_group_id = aws_security_group.jobs[0].id
}

resource "aws_vpc_security_group_egress_rule" "to_endpoints" {
  count = local.makes_vpc ? 1 : 0

  security_group_id            = aws_security_group.jobs[0].id
  description                  = "HTTPS to AWS's interface endpoints"
  ip_protocol                  = "tcp"
  from_port                    = 443
  to_port                      = 443
  referenced_security_group_id = aws_security_group.endpoints[0].id
}

resource "aws_vpc_security_group_egress_rule" "to_s3" {
  count = local.makes_vpc ? 1 : 0

  security_group_id = aws_security_group.jobs[0].id
  description       = "HTTPS to S3 through its gateway endpoint"
  ip_protocol       = "tcp"
  from_port         = 443
  to_port           = 443
  prefix_list_id    = aws_vpc_endpoint.s3[0].prefix_list_id
}

# In an existing network, its own routes determine how hosts reach AWS.
resource "aws_vpc_security_group_egress_rule" "https" {
  count = local.makes_group && !local.makes_vpc ? 1 : 0

  security_group_id = aws_security_group.jobs[0].id
  description       = "HTTPS to AWS through the routes of the network"
  ip_protocol       = "tcp"
  from_port         = 443
  to_port           = 443
  cidr_ipv4         = "0.0.0.0/0"
}
