# The SNS topic for alerts, and the alarm for jobs that did not complete.

resource "aws_sns_topic" "alerts" {
  name              = "${var.name}-alerts"
  kms_master_key_id = aws_kms_key.this.arn
  tags              = local.tags
}

# AWS sends each address an email with a link to confirm the subscription.
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
  # No condition: according to EventBridge's guide its calls satisfy no condition in a topic's policy. A lost alarm would be
  # worse than a message from a rule of another account.
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
  description = "A training job has failed, was stopped, or has reached its time limit"
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
