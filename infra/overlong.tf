# Alarm for jobs that train longer than expected. AWS has no event for this, so a state machine waits for each job.

locals {
  watches_long_jobs = var.overlong_hours != null
}

resource "aws_cloudwatch_event_rule" "began" {
  count = local.watches_long_jobs ? 1 : 0

  name        = "${var.name}-began"
  description = "A training job has started to train on its instances"
  event_pattern = jsonencode({
    source      = ["aws.sagemaker"]
    detail-type = ["SageMaker Training Job State Change"]
    detail = {
      RoleArn           = [aws_iam_role.execution.arn]
      TrainingJobStatus = ["InProgress"]
      SecondaryStatus   = ["Training"]
    }
  })
  tags = local.tags
}

resource "aws_cloudwatch_event_target" "began" {
  count = local.watches_long_jobs ? 1 : 0

  rule     = aws_cloudwatch_event_rule.began[0].name
  arn      = aws_sfn_state_machine.overlong[0].arn
  role_arn = aws_iam_role.starts_watch[0].arn

  input_path = "$.detail"
}

resource "aws_sfn_state_machine" "overlong" {
  count = local.watches_long_jobs ? 1 : 0

  name     = "${var.name}-overlong"
  role_arn = aws_iam_role.watch[0].arn
  tags     = local.tags
  definition = jsonencode({
    Comment = "Send an alert if a training job runs for longer than ${var.overlong_hours} hours."
    StartAt = "Wait"
    States = {
      Wait = {
        Type    = "Wait"
        Seconds = var.overlong_hours * 3600
        Next    = "Describe"
      }
      Describe = {
        Type       = "Task"
        Resource   = "arn:${local.partition}:states:::aws-sdk:sagemaker:describeTrainingJob"
        Parameters = { "TrainingJobName.$" = "$.TrainingJobName" }
        Retry      = [{ ErrorEquals = ["States.ALL"], IntervalSeconds = 60, MaxAttempts = 5, BackoffRate = 2 }]
        Next       = "IsRunning"
      }
      IsRunning = {
        Type    = "Choice"
        Choices = [{ Variable = "$.TrainingJobStatus", StringEquals = "InProgress", Next = "Notify" }]
        Default = "Ended"
      }
      Notify = {
        Type     = "Task"
        Resource = "arn:${local.partition}:states:::sns:publish"
        Parameters = {
          TopicArn    = aws_sns_topic.alerts.arn
          "Message.$" = "States.Format('{}: is still running after ${var.overlong_hours} hours. See: cloudtrain status sagemaker:{}', $.TrainingJobName, $.TrainingJobName)"
        }
        Next = "Ended"
      }
      Ended = { Type = "Succeed" }
    }
  })
}

resource "aws_iam_role" "watch" {
  count = local.watches_long_jobs ? 1 : 0

  name                 = "${var.name}-overlong"
  description          = "Checks whether a training job is running, and sends alerts"
  assume_role_policy   = data.aws_iam_policy_document.assume["states"].json
  permissions_boundary = var.permissions_boundary
  tags                 = local.tags
}

resource "aws_iam_role_policy" "watch" {
  count = local.watches_long_jobs ? 1 : 0

  name   = "describe-and-notify"
  role   = aws_iam_role.watch[0].id
  policy = data.aws_iam_policy_document.watch.json
}

data "aws_iam_policy_document" "watch" {
  statement {
    sid       = "DescribeJobs"
    actions   = ["sagemaker:DescribeTrainingJob"]
    resources = ["${local.training_jobs}/*"]
  }

  statement {
    sid       = "SendAlerts"
    actions   = ["sns:Publish"]
    resources = [aws_sns_topic.alerts.arn]
  }

  statement {
    sid       = "EncryptAlerts"
    actions   = ["kms:Decrypt", "kms:GenerateDataKey"]
    resources = [aws_kms_key.this.arn]
    condition {
      test     = "StringEquals"
      variable = "kms:ViaService"
      values   = ["sns.${local.region}.${local.dns}"]
    }
  }
}

resource "aws_iam_role" "starts_watch" {
  count = local.watches_long_jobs ? 1 : 0

  name                 = "${var.name}-starts-overlong"
  description          = "Starts the state machine that waits while a training job runs"
  assume_role_policy   = data.aws_iam_policy_document.assume["events"].json
  permissions_boundary = var.permissions_boundary
  tags                 = local.tags
}

resource "aws_iam_role_policy" "starts_watch" {
  count = local.watches_long_jobs ? 1 : 0

  name   = "start"
  role   = aws_iam_role.starts_watch[0].id
  policy = data.aws_iam_policy_document.starts_watch[0].json
}

data "aws_iam_policy_document" "starts_watch" {
  count = local.watches_long_jobs ? 1 : 0

  statement {
    sid       = "Start"
    actions   = ["states:StartExecution"]
    resources = [aws_sfn_state_machine.overlong[0].arn]
  }
}

data "aws_iam_policy_document" "assume" {
  for_each = toset(["events", "states"])

  statement {
    sid     = "ThisAccountOnly"
    actions = ["sts:AssumeRole"]
    principals {
      type        = "Service"
      identifiers = ["${each.value}.amazonaws.com"]
    }
    condition {
      test     = "StringEquals"
      variable = "aws:SourceAccount"
      values   = [local.account]
    }
  }
}
