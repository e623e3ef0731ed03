# One topic for everything that somebody should know, and the jobs that did not end well.

resource "aws_sns_topic" "alerts" {
  name              = "${var.name}-alerts"
  kms_master_key_id = aws_kms_key.this.arn
  tags              = local.tags
}

# AWS sends each address a mail whose link must be followed once.
resource "aws_sns_topic_subscription" "email" {
  for_each = var.alert_emails

  topic_arn = aws_sns_topic.alerts.arn
  protocol  = "email"
  endpoint  = each.value
}

resource "aws_sns_topic_policy" "alerts" {
  arn    = aws_sns_topic.alerts.arn
  policy = data.aws_iam_policy_document.alerts.json
}

data "aws_iam_policy_document" "alerts" {
  # Without a condition: EventBridge's guide has long said that its calls meet none in a topic's policy, and an alarm that
  # never comes is worse than a rule of a stranger's that says too much.
  statement {
    sid       = "Rules"
    actions   = ["sns:Publish"]
    resources = [aws_sns_topic.alerts.arn]
    principals {
      type        = "Service"
      identifiers = ["events.amazonaws.com"]
    }
  }

  statement {
    sid       = "Budgets"
    actions   = ["sns:Publish"]
    resources = [aws_sns_topic.alerts.arn]
    principals {
      type        = "Service"
      identifiers = ["budgets.amazonaws.com"]
    }
    condition {
      test     = "StringEquals"
      variable = "aws:SourceAccount"
      values   = [local.account]
    }
  }
}

resource "aws_cloudwatch_event_rule" "ended_badly" {
  name        = "${var.name}-ended-badly"
  description = "A training job has failed, was stopped, or has reached its limit of time"
  event_pattern = jsonencode({
    source      = ["aws.sagemaker"]
    detail-type = ["SageMaker Training Job State Change"]
    detail = {
      RoleArn           = [aws_iam_role.execution.arn]
      TrainingJobStatus = ["Failed", "Stopped"]
    }
  })
  tags = local.tags
}

resource "aws_cloudwatch_event_target" "ended_badly" {
  rule = aws_cloudwatch_event_rule.ended_badly.name
  arn  = aws_sns_topic.alerts.arn

  input_transformer {
    input_paths = {
      job    = "$.detail.TrainingJobName"
      status = "$.detail.TrainingJobStatus"
      why    = "$.detail.SecondaryStatus"
    }
    input_template = "\"<job>: <status> (<why>). See: cloudtrain explain sagemaker:<job>\""
  }
}
