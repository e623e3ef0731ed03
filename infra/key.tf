# The KMS key of the bucket, the jobs' volumes and the alerts.

resource "aws_kms_key" "this" {
  description             = "${var.name}: code, checkpoints, models, volumes of training jobs, alerts"
  enable_key_rotation     = true
  deletion_window_in_days = 30
  policy                  = data.aws_iam_policy_document.key.json
  tags                    = local.tags
}

resource "aws_kms_alias" "this" {
  name          = "alias/${var.name}"
  target_key_id = aws_kms_key.this.key_id
}

data "aws_iam_policy_document" "key" {
  # In a key policy `*` is this key. AWS rejects a policy without this statement, because the key could not be managed any
  # more. With it, the IAM policies in role.tf and submitter.tf control access.
  statement {
    sid       = "AccountDecides"
    actions   = ["kms:*"]
    resources = ["*"]
    principals {
      type        = "AWS"
      identifiers = ["arn:${local.partition}:iam::${local.account}:root"]
    }
  }

  # No condition, as in the topic's policy (alarms.tf).
  statement {
    sid       = "RulesEncryptAlerts"
    actions   = ["kms:Decrypt", "kms:GenerateDataKey"]
    resources = ["*"]
    principals {
      type        = "Service"
      identifiers = ["events.amazonaws.com"]
    }
  }

  statement {
    sid       = "BudgetsEncryptAlerts"
    actions   = ["kms:Decrypt", "kms:GenerateDataKey"]
    resources = ["*"]
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

  # FSx reads and writes the bucket with a role that AWS creates for each file system.
  dynamic "statement" {
    for_each = var.lustre == null ? [] : [1]
    content {
      sid       = "LustreReadsTheBucket"
      actions   = ["kms:Decrypt", "kms:DescribeKey", "kms:GenerateDataKey"]
      resources = ["*"]
      principals {
        type        = "AWS"
        identifiers = ["*"]
      }
      condition {
        test     = "StringEquals"
        variable = "kms:CallerAccount"
        values   = [local.account]
      }
      condition {
        test     = "ArnLike"
        variable = "aws:PrincipalArn"
        values = [
          "arn:${local.partition}:iam::${local.account}:role/aws-service-role/s3.data-source.lustre.fsx.amazonaws.com/*",
        ]
      }
    }
  }
}
