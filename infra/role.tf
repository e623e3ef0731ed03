# The execution role, which SageMaker assumes for every host of a training job.

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
    # Prevents that SageMaker uses this role for a job of another account.
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
  # No condition on the prefix, because HeadBucket, with which clients find the region, sends no prefix.
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

  # A compromised job must not change the code or configuration of other jobs, or the locks of submits.
  statement {
    sid     = "CodeIsTheSubmittersOnly"
    effect  = "Deny"
    actions = ["s3:DeleteObject", "s3:PutObject"]
    resources = concat(
      [for folder in ["chains", "code", "packages", "queues", "requests", "sweeps"] : "${local.objects}/${folder}/*"],
      [for file in ["config/run.json", "plan.json"] : "${local.objects}/*/${file}"],
    )
  }

  # Checkpoints beyond `checkpoint.keep`. Their versions are kept for `noncurrent_days` (bucket.tf).
  statement {
    sid       = "PruneCheckpoints"
    actions   = ["s3:DeleteObject"]
    resources = ["${local.objects}/*/checkpoints/*"]
  }

  statement {
    sid       = "EncryptObjects"
    actions   = ["kms:Decrypt", "kms:GenerateDataKey"]
    resources = [aws_kms_key.this.arn]
  }

  statement {
    sid       = "EncryptVolumes"
    actions   = ["kms:CreateGrant"]
    resources = [aws_kms_key.this.arn]
    # Only an AWS service may create the grant, for a volume that it creates.
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

  # What MLflow's client needs to log a Task: no deletion, no models.
  dynamic "statement" {
    for_each = length(var.mlflow_servers) == 0 ? [] : [1]
    content {
      sid = "LogToMlflow"
      actions = [
        "sagemaker-mlflow:CreateExperiment",
        "sagemaker-mlflow:CreateRun",
        "sagemaker-mlflow:GetExperimentByName",
        "sagemaker-mlflow:GetMetricHistory",
        "sagemaker-mlflow:GetRun",
        "sagemaker-mlflow:LogBatch",
        "sagemaker-mlflow:SearchRuns",
        "sagemaker-mlflow:UpdateRun",
      ]
      resources = var.mlflow_servers
    }
  }

  # Serverless MLflow apps need this action for each request.
  dynamic "statement" {
    for_each = length([for arn in var.mlflow_servers : arn if strcontains(arn, ":mlflow-app/")]) == 0 ? [] : [1]
    content {
      sid       = "CallMlflowApps"
      actions   = ["sagemaker:CallMlflowAppApi"]
      resources = [for arn in var.mlflow_servers : arn if strcontains(arn, ":mlflow-app/")]
    }
  }

  dynamic "statement" {
    for_each = length(var.mlflow_artifacts) == 0 ? [] : [1]
    content {
      sid     = "WriteMlflowArtifacts"
      actions = ["s3:PutObject"]
      resources = [
        for uri in var.mlflow_artifacts :
        "arn:${local.partition}:s3:::${trimsuffix(trimprefix(uri, "s3://"), "/")}/*"
      ]
    }
  }

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

  dynamic "statement" {
    for_each = var.allow_endpoints ? [1] : []
    content {
      sid       = "WriteLogsOfEndpoints"
      actions   = ["logs:CreateLogGroup", "logs:CreateLogStream", "logs:DescribeLogStreams", "logs:PutLogEvents"]
      resources = ["arn:${local.partition}:logs:${local.region}:${local.account}:log-group:/aws/sagemaker/Endpoints/*"]
    }
  }

  # CloudWatch metrics have no resource ARNs; the namespace is the one of SageMaker's training jobs.
  statement {
    sid       = "WriteMetrics"
    actions   = ["cloudwatch:PutMetricData"]
    resources = ["*"]
    condition {
      test     = "StringEquals"
      variable = "cloudwatch:namespace"
      values   = concat(["/aws/sagemaker/TrainingJobs"], var.allow_endpoints ? ["/aws/sagemaker/Endpoints"] : [])
    }
  }

  # The token belongs to the account, so this action has no resource ARN.
  statement {
    sid       = "LogInToRegistry"
    actions   = ["ecr:GetAuthorizationToken"]
    resources = ["*"]
  }

  statement {
    sid       = "PullImage"
    actions   = ["ecr:BatchCheckLayerAvailability", "ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer"]
    resources = concat(local.image_repositories, local.serving_repositories)
  }

  # SageMaker asks the function for the credentials of a private registry.
  dynamic "statement" {
    for_each = length(var.registry_functions) == 0 ? [] : [1]
    content {
      sid       = "AskForRegistryCredentials"
      actions   = ["lambda:InvokeFunction"]
      resources = var.registry_functions
    }
  }

  # The agent of Systems Manager in the container. These actions have no resource ARNs.
  dynamic "statement" {
    for_each = var.allow_remote_debugging ? [1] : []
    content {
      sid = "ConnectShells"
      actions = [
        "ssmmessages:CreateControlChannel",
        "ssmmessages:CreateDataChannel",
        "ssmmessages:OpenControlChannel",
        "ssmmessages:OpenDataChannel",
      ]
      resources = ["*"]
    }
  }

  # These EC2 actions have no resource ARNs.
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

  # The interface does not exist yet, so subnet and security group restrict where it can be created.
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
