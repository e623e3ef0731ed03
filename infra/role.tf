# The execution role: what a training job may do. SageMaker takes it on for every host of a job.

resource "aws_iam_role" "execution" {
  name                 = "${var.name}-execution"
  description          = "What training jobs of cloudtrain may do"
  assume_role_policy   = data.aws_iam_policy_document.trust.json
  permissions_boundary = var.permissions_boundary
  tags                 = local.tags
}

data "aws_iam_policy_document" "trust" {
  statement {
    sid     = "SageMakerForThisAccountOnly"
    actions = ["sts:AssumeRole"]
    principals {
      type        = "Service"
      identifiers = ["sagemaker.amazonaws.com"]
    }
    # So that no other account's job can make SageMaker use this role.
    condition {
      test     = "StringEquals"
      variable = "aws:SourceAccount"
      values   = [local.account]
    }
  }
}

resource "aws_iam_role_policy" "execution" {
  name   = "training-job"
  role   = aws_iam_role.execution.id
  policy = data.aws_iam_policy_document.execution.json
}

data "aws_iam_policy_document" "execution" {
  # ---------------------------------------------------------------- S3

  # Without a condition on the prefix, because HeadBucket, by which clients find the region, sends none.
  statement {
    sid       = "List"
    actions   = ["s3:ListBucket"]
    resources = concat([aws_s3_bucket.this.arn], local.data_buckets)
  }

  statement {
    sid       = "Read"
    actions   = ["s3:GetObject"]
    resources = concat(["${local.objects}/*"], local.data_objects)
  }

  # Models, checkpoints, TensorBoard files, stacks of a hang.
  statement {
    sid       = "Write"
    actions   = ["s3:AbortMultipartUpload", "s3:PutObject"]
    resources = ["${local.objects}/*"]
  }

  # A job that is taken over must not change what the next one runs or goes on as, nor who submits what.
  statement {
    sid     = "CodeIsTheSubmittersOnly"
    effect  = "Deny"
    actions = ["s3:DeleteObject", "s3:PutObject"]
    resources = concat(
      [for folder in ["code", "queues", "requests"] : "${local.objects}/${folder}/*"],
      [for file in ["config/run.json", "plan.json"] : "${local.objects}/*/${file}"],
    )
  }

  # Checkpoints beyond `checkpoint.keep`. Their versions stay for a while: bucket.tf.
  statement {
    sid       = "PruneCheckpoints"
    actions   = ["s3:DeleteObject"]
    resources = ["${local.objects}/*/checkpoints/*"]
  }

  # ---------------------------------------------------------------- keys

  statement {
    sid       = "EncryptObjects"
    actions   = ["kms:Decrypt", "kms:GenerateDataKey"]
    resources = [aws_kms_key.this.arn]
  }

  statement {
    sid       = "EncryptVolumes"
    actions   = ["kms:CreateGrant"]
    resources = [aws_kms_key.this.arn]
    # Only a service may ask for the grant, for a volume that it makes.
    condition {
      test     = "Bool"
      variable = "kms:GrantIsForAWSResource"
      values   = ["true"]
    }
  }

  dynamic "statement" {
    for_each = length(var.read_only_keys) == 0 ? [] : [1]
    content {
      sid       = "DecryptDataAndSecrets"
      actions   = ["kms:Decrypt"]
      resources = var.read_only_keys
    }
  }

  dynamic "statement" {
    for_each = length(var.secrets) == 0 ? [] : [1]
    content {
      sid       = "ReadSecrets"
      actions   = ["secretsmanager:GetSecretValue"]
      resources = var.secrets
    }
  }

  # ---------------------------------------------------------------- logs and metrics

  statement {
    sid       = "MakeTheLogGroup"
    actions   = ["logs:CreateLogGroup", "logs:DescribeLogStreams"]
    resources = ["${local.log_group_arn}:*"]
  }

  statement {
    sid       = "WriteLogs"
    actions   = ["logs:CreateLogStream", "logs:PutLogEvents"]
    resources = ["${local.log_group_arn}:log-stream:*"]
  }

  # No resource can be named for metrics; the namespace is the one of SageMaker's training jobs.
  statement {
    sid       = "WriteMetrics"
    actions   = ["cloudwatch:PutMetricData"]
    resources = ["*"]
    condition {
      test     = "StringEquals"
      variable = "cloudwatch:namespace"
      values   = ["/aws/sagemaker/TrainingJobs"]
    }
  }

  # ---------------------------------------------------------------- the image

  # The token is the account's: no resource can be named.
  statement {
    sid       = "LogInToRegistry"
    actions   = ["ecr:GetAuthorizationToken"]
    resources = ["*"]
  }

  statement {
    sid       = "PullImage"
    actions   = ["ecr:BatchCheckLayerAvailability", "ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer"]
    resources = local.image_repositories
  }

  # ---------------------------------------------------------------- network interfaces

  # EC2 lets no resource be named for these.
  statement {
    sid = "LookAtNetwork"
    actions = [
      "ec2:DescribeDhcpOptions",
      "ec2:DescribeNetworkInterfaces",
      "ec2:DescribeSecurityGroups",
      "ec2:DescribeSubnets",
      "ec2:DescribeVpcs",
    ]
    resources = ["*"]
  }

  # The interface does not exist yet: where it may be made is said by subnet and group.
  statement {
    sid       = "MakeInterfacesInSubnets"
    actions   = ["ec2:CreateNetworkInterface"]
    resources = concat(local.subnet_arns, local.security_group_arns, ["${local.ec2_arn}:network-interface/*"])
  }

  statement {
    sid = "UseInterfacesInSubnets"
    actions = [
      "ec2:CreateNetworkInterfacePermission",
      "ec2:DeleteNetworkInterface",
      "ec2:DeleteNetworkInterfacePermission",
    ]
    resources = ["${local.ec2_arn}:network-interface/*"]
    condition {
      test     = "ArnEquals"
      variable = "ec2:Subnet"
      values   = local.subnet_arns
    }
  }
}
