# The function that continues runs with `limits.recover` when no controller on a user's machine does, only with
# `recovery_function`. It is called when a job has ended, and every five minutes for runs that wait for capacity.
# Several calls at a time start no run twice: each holds the lock of the run in S3, as controllers elsewhere do.

locals {
  recovers      = var.recovery_function != null
  recovery_name = "${var.name}-recovery"
}

resource "aws_lambda_function" "recovery" {
  count = local.recovers ? 1 : 0

  function_name    = local.recovery_name
  description      = "Continues runs of cloudtrain that an outside cause has ended"
  role             = aws_iam_role.recovery[0].arn
  runtime          = "python3.12"
  architectures    = ["x86_64"]
  handler          = "cloudtrain.features.recovery.account.handler"
  filename         = var.recovery_function
  source_code_hash = filebase64sha256(var.recovery_function)
  memory_size      = 512
  timeout          = 240 # below the 300 seconds after which the lock of a call that was killed expires
  tags             = local.tags

  environment {
    variables = {
      CLOUDTRAIN_BUCKET          = aws_s3_bucket.this.id
      CLOUDTRAIN_HOME            = "/tmp/cloudtrain"
      CLOUDTRAIN_KMS_KEY         = aws_kms_key.this.arn
      CLOUDTRAIN_PREFIX          = var.prefix
      CLOUDTRAIN_REGION          = local.region
      CLOUDTRAIN_ROLE            = aws_iam_role.execution.arn
      CLOUDTRAIN_SECURITY_GROUPS = join(",", local.security_group_ids)
      CLOUDTRAIN_SUBNETS         = join(",", local.subnet_ids)
      CLOUDTRAIN_TRANSPORT       = "boto3" # the function has no SageMaker SDK
      HOME                       = "/tmp"
    }
  }

  depends_on = [aws_cloudwatch_log_group.recovery, aws_iam_role_policy.recovery]
}

resource "aws_cloudwatch_log_group" "recovery" {
  count = local.recovers ? 1 : 0

  name              = "/aws/lambda/${local.recovery_name}"
  retention_in_days = 90
  tags              = local.tags
}

resource "aws_cloudwatch_event_rule" "recovery_ended" {
  count = local.recovers ? 1 : 0

  name        = "${local.recovery_name}-ended"
  description = "A training job has ended, and its run may continue"
  event_pattern = jsonencode({
    source      = ["aws.sagemaker"]
    detail-type = ["SageMaker Training Job State Change"]
    detail = {
      RoleArn           = [aws_iam_role.execution.arn]
      TrainingJobStatus = ["Completed", "Failed", "Stopped"]
    }
  })
  tags = local.tags
}

resource "aws_cloudwatch_event_rule" "recovery_waiting" {
  count = local.recovers ? 1 : 0

  name                = "${local.recovery_name}-waiting"
  description         = "Runs that wait for capacity, and ends whose event was lost"
  schedule_expression = "rate(5 minutes)"
  tags                = local.tags
}

locals {
  recovery_rules = local.recovers ? {
    ended   = aws_cloudwatch_event_rule.recovery_ended[0]
    waiting = aws_cloudwatch_event_rule.recovery_waiting[0]
  } : {}
}

resource "aws_cloudwatch_event_target" "recovery" {
  for_each = local.recovery_rules

  rule = each.value.name
  arn  = aws_lambda_function.recovery[0].arn
}

# Nothing else may call the function.
resource "aws_lambda_permission" "recovery" {
  for_each = local.recovery_rules

  statement_id   = each.key
  action         = "lambda:InvokeFunction"
  function_name  = aws_lambda_function.recovery[0].function_name
  principal      = "events.amazonaws.com"
  source_arn     = each.value.arn
  source_account = local.account
}

resource "aws_iam_role" "recovery" {
  count = local.recovers ? 1 : 0

  name                 = local.recovery_name
  description          = "Continues runs of cloudtrain with the role ${aws_iam_role.execution.name}"
  assume_role_policy   = data.aws_iam_policy_document.recovery_trust.json
  permissions_boundary = var.permissions_boundary
  tags                 = local.tags
}

data "aws_iam_policy_document" "recovery_trust" {
  statement {
    sid     = "LambdaForThisFunctionOnly"
    actions = ["sts:AssumeRole"]
    principals {
      type        = "Service"
      identifiers = ["lambda.amazonaws.com"]
    }
    condition {
      test     = "StringEquals"
      variable = "aws:SourceAccount"
      values   = [local.account]
    }
  }
}

resource "aws_iam_role_policy" "recovery" {
  count = local.recovers ? 1 : 0

  name   = "continue-runs"
  role   = aws_iam_role.recovery[0].id
  policy = data.aws_iam_policy_document.recovery.json
}

data "aws_iam_policy_document" "recovery" {
  # The limits of a job are those of submitters (submitter.tf).
  source_policy_documents = [data.aws_iam_policy_document.creations["CreateTrainingJob"].json]

  dynamic "statement" {
    for_each = length(var.training_plans) == 0 ? [] : [1]
    content {
      sid       = "UseTrainingPlans"
      actions   = ["sagemaker:CreateTrainingJob"]
      resources = concat(tolist(var.training_plans), [local.reserved_capacities])
    }
  }

  statement {
    sid       = "PassThisRoleOnly"
    actions   = ["iam:PassRole"]
    resources = [aws_iam_role.execution.arn]
    condition {
      test     = "StringEquals"
      variable = "iam:PassedToService"
      values   = ["sagemaker.amazonaws.com"]
    }
  }

  statement {
    sid       = "TagJobsAsTheyAreMade"
    actions   = ["sagemaker:AddTags"]
    resources = ["${local.training_jobs}/*"]
    condition {
      test     = "StringEquals"
      variable = "sagemaker:TaggingAction"
      values   = ["CreateTrainingJob"]
    }
  }

  statement {
    sid       = "FollowJobs"
    actions   = ["sagemaker:DescribeTrainingJob", "sagemaker:ListTags"]
    resources = ["${local.training_jobs}/*"]
  }

  statement {
    sid       = "EndJobsOfCloudtrain"
    actions   = ["sagemaker:StopTrainingJob"]
    resources = ["${local.training_jobs}/*"]
    condition {
      test     = "Null"
      variable = "aws:ResourceTag/cloudtrain:job"
      values   = ["false"]
    }
  }

  statement {
    sid       = "ReadLogsOfJobs"
    actions   = ["logs:DescribeLogStreams", "logs:GetLogEvents"]
    resources = ["${local.log_group_arn}:*"]
  }

  statement {
    sid       = "List"
    actions   = ["s3:ListBucket"]
    resources = [aws_s3_bucket.this.arn]
  }

  statement {
    sid       = "Read"
    actions   = ["s3:GetObject"]
    resources = ["${local.objects}/*"]
  }

  # Records and locks, and what a new run needs. No checkpoint, model or data.
  statement {
    sid     = "Write"
    actions = ["s3:PutObject"]
    resources = [
      "${local.objects}/chains/*",
      "${local.objects}/requests/*",
      "${local.objects}/*/config/run.json",
      "${local.objects}/*/plan.json",
    ]
  }

  # Code that is older than 30 days is uploaded again, before it expires.
  statement {
    sid       = "RenewCode"
    actions   = ["s3:PutObject"]
    resources = ["${local.objects}/code/*"]
  }

  statement {
    sid       = "EncryptObjects"
    actions   = ["kms:Decrypt", "kms:GenerateDataKey"]
    resources = [aws_kms_key.this.arn]
    condition {
      test     = "StringEquals"
      variable = "kms:ViaService"
      values   = ["s3.${local.region}.${local.dns}"]
    }
  }

  statement {
    sid       = "WriteItsLog"
    actions   = ["logs:CreateLogStream", "logs:PutLogEvents"]
    resources = ["arn:${local.partition}:logs:${local.region}:${local.account}:log-group:/aws/lambda/${local.recovery_name}:log-stream:*"]
  }
}
