# VPC endpoints of AWS services. The private subnets have no other route: no internet gateway, no NAT gateway.

resource "aws_vpc_endpoint" "s3" {
  count = local.makes_vpc ? 1 : 0

  vpc_id            = aws_vpc.this[0].id
  service_name      = "com.amazonaws.${local.region}.s3"
  vpc_endpoint_type = "Gateway"
  route_table_ids   = [aws_route_table.private[0].id]
  policy            = data.aws_iam_policy_document.s3_endpoint[0].json
  tags              = merge(local.tags, { Name = "${var.name}-s3" })
}

# A job cannot write to other buckets with any credentials.
data "aws_iam_policy_document" "s3_endpoint" {
  count = local.makes_vpc ? 1 : 0

  statement {
    sid = "TheBucket"
    actions = [
      "s3:AbortMultipartUpload",
      "s3:DeleteObject",
      "s3:GetObject",
      "s3:ListBucket",
      "s3:PutObject",
    ]
    resources = [aws_s3_bucket.this.arn, "${aws_s3_bucket.this.arn}/*"]
    principals {
      type        = "*"
      identifiers = ["*"]
    }
  }

  dynamic "statement" {
    for_each = length(var.read_only_data) == 0 ? [] : [1]
    content {
      sid       = "TheData"
      actions   = ["s3:GetObject", "s3:ListBucket"]
      resources = concat(local.data_buckets, local.data_objects)
      principals {
        type        = "*"
        identifiers = ["*"]
      }
    }
  }

  # Bucket of ECR for image layers.
  statement {
    sid       = "Images"
    actions   = ["s3:GetObject"]
    resources = ["arn:${local.partition}:s3:::prod-${local.region}-starport-layer-bucket/*"]
    principals {
      type        = "*"
      identifiers = ["*"]
    }
  }
}

locals {
  interface_endpoints = setunion(
    var.interface_endpoints,
    length(var.secrets) > 0 ? ["secretsmanager"] : [],
    length(var.registry_functions) > 0 ? ["lambda"] : [],
    var.allow_remote_debugging ? ["ec2messages", "ssm", "ssmmessages"] : [],
  )
}

# A job cannot use these services with credentials of another account.
data "aws_iam_policy_document" "interface_endpoint" {
  count = local.makes_vpc ? 1 : 0

  statement {
    sid       = "ThisAccountOnly"
    actions   = ["*"]
    resources = ["*"]
    principals {
      type        = "*"
      identifiers = ["*"]
    }
    condition {
      test     = "StringEquals"
      variable = "aws:PrincipalAccount"
      values   = [local.account]
    }
  }
}

resource "aws_vpc_endpoint" "interface" {
  for_each = local.makes_vpc ? local.interface_endpoints : []

  vpc_id              = aws_vpc.this[0].id
  service_name        = "com.amazonaws.${local.region}.${each.value}"
  vpc_endpoint_type   = "Interface"
  subnet_ids          = local.subnet_ids
  security_group_ids  = [aws_security_group.endpoints[0].id]
  policy              = data.aws_iam_policy_document.interface_endpoint[0].json
  private_dns_enabled = true
  tags                = merge(local.tags, { Name = "${var.name}-${each.value}" })
}

resource "aws_security_group" "endpoints" {
  count = local.makes_vpc ? 1 : 0

  name        = "${var.name}-endpoints"
  description = "AWS's interface endpoints: HTTPS from the hosts of training jobs"
  vpc_id      = aws_vpc.this[0].id
  tags        = merge(local.tags, { Name = "${var.name}-endpoints" })
}

resource "aws_vpc_security_group_ingress_rule" "from_jobs" {
  count = local.makes_vpc ? 1 : 0

  security_group_id            = aws_security_group.endpoints[0].id
  description                  = "HTTPS from the hosts of training jobs"
  ip_protocol                  = "tcp"
  from_port                    = 443
  to_port                      = 443
  referenced_security_group_id = aws_security_group.jobs[0].id
}
