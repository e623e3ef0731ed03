# The rule for each topic of `notify` in job files: a message when such a job completes, fails or is stopped.

resource "aws_cloudwatch_event_rule" "notify" {
  for_each = var.notify_topics

  name        = "${var.name}-notify-${reverse(split(":", each.value))[0]}"
  description = "A training job that names this topic in `notify` has ended"
  event_pattern = jsonencode({
    source      = ["aws.sagemaker"]
    detail-type = ["SageMaker Training Job State Change"]
    detail = {
      RoleArn           = [aws_iam_role.execution.arn]
      TrainingJobStatus = ["Completed", "Failed", "Stopped"]
      Tags              = { "cloudtrain:notify" = [each.value] }
    }
  })
  tags = local.tags
}

resource "aws_cloudwatch_event_target" "notify" {
  for_each = var.notify_topics

  rule = aws_cloudwatch_event_rule.notify[each.value].name
  arn  = each.value

  input_transformer {
    input_paths = {
      job    = "$.detail.TrainingJobName"
      status = "$.detail.TrainingJobStatus"
      why    = "$.detail.SecondaryStatus"
    }
    input_template = "\"<job>: <status> (<why>). See: cloudtrain status sagemaker:<job>\""
  }
}
