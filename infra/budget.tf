# The monthly budget for SageMaker and its notifications.

resource "aws_budgets_budget" "this" {
  count = var.budget_usd == null ? 0 : 1

  name         = "${var.name}-sagemaker"
  budget_type  = "COST"
  time_unit    = "MONTHLY"
  limit_amount = tostring(var.budget_usd)
  limit_unit   = "USD"
  tags         = local.tags

  cost_filter {
    name   = "Service"
    values = ["Amazon SageMaker"]
  }

  dynamic "notification" {
    for_each = concat(
      [for percent in var.budget_actual_percent : { kind = "ACTUAL", percent = percent }],
      [for percent in var.budget_forecast_percent : { kind = "FORECASTED", percent = percent }],
    )
    content {
      notification_type          = notification.value.kind
      threshold                  = notification.value.percent
      threshold_type             = "PERCENTAGE"
      comparison_operator        = "GREATER_THAN"
      subscriber_email_addresses = var.alert_emails
      subscriber_sns_topic_arns  = [aws_sns_topic.alerts.arn]
    }
  }

  depends_on = [aws_sns_topic_policy.alerts] # AWS rejects a topic that it cannot publish to
}
