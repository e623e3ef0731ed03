# Policy of those who deploy models, only with `allow_endpoints`: an endpoint is billed until someone deletes it.
# `submitter_roles` get it, too. It needs the policies in submitter.tf, which allow the upload and pass the role.

resource "aws_iam_policy" "deploy" {
  count = var.allow_endpoints ? 1 : 0

  name        = "${var.name}-deploy"
  description = "Create, invoke and delete endpoints of cloudtrain with the role ${aws_iam_role.execution.name}"
  policy      = data.aws_iam_policy_document.deploy.json
  tags        = local.tags
}

resource "aws_iam_role_policy_attachment" "deployers" {
  for_each = var.allow_endpoints ? var.submitter_roles : []

  role       = reverse(split("/", each.value))[0]
  policy_arn = aws_iam_policy.deploy[0].arn
}

locals {
  sagemaker_arn = "arn:${local.partition}:sagemaker:${local.region}:${local.account}"
  models        = "${local.sagemaker_arn}:model/*"
  configs       = "${local.sagemaker_arn}:endpoint-config/*"
  endpoints     = "${local.sagemaker_arn}:endpoint/*"
}

data "aws_iam_policy_document" "deploy" {
  # Without a network, a container could send data to the internet. So serverless endpoints, which have none, are refused.
  statement {
    sid       = "CreateModelsInTheNetwork"
    actions   = ["sagemaker:CreateModel"]
    resources = [local.models]

    condition {
      test     = "ForAllValues:StringEquals"
      variable = "sagemaker:VpcSubnets"
      values   = local.subnet_ids
    }
    condition {
      test     = "ForAllValues:StringEquals"
      variable = "sagemaker:VpcSecurityGroupIds"
      values   = local.security_group_ids
    }
    # ForAllValues is true for an empty set, so the keys must also be present.
    dynamic "condition" {
      for_each = ["VpcSecurityGroupIds", "VpcSubnets"]
      content {
        test     = "Null"
        variable = "sagemaker:${condition.value}"
        values   = ["false"]
      }
    }
  }

  dynamic "statement" {
    for_each = local.groups_of_types
    content {
      sid       = "ConfigureWith${statement.key}"
      actions   = ["sagemaker:CreateEndpointConfig"]
      resources = [local.configs]

      condition {
        test     = "ForAllValues:StringLike"
        variable = "sagemaker:InstanceTypes"
        values   = statement.value
      }
      condition {
        test     = "Null"
        variable = "sagemaker:InstanceTypes"
        values   = ["false"]
      }
      dynamic "condition" {
        for_each = statement.key == "Volumes" ? [1] : []
        content {
          test     = "ArnEquals"
          variable = "sagemaker:VolumeKmsKey"
          values   = [aws_kms_key.this.arn]
        }
      }
    }
  }

  statement {
    sid       = "CreateEndpoints"
    actions   = ["sagemaker:CreateEndpoint"]
    resources = [local.configs, local.endpoints]
  }

  statement {
    sid       = "TagAsTheyAreMade"
    actions   = ["sagemaker:AddTags"]
    resources = [local.models, local.configs, local.endpoints]
    condition {
      test     = "StringEquals"
      variable = "sagemaker:TaggingAction"
      values   = ["CreateModel", "CreateEndpointConfig", "CreateEndpoint"]
    }
  }

  # What cloudtrain creates has this tag from its creation, and these policies cannot add it to anything else.
  statement {
    sid       = "UseEndpointsOfCloudtrain"
    actions   = ["sagemaker:DeleteEndpoint", "sagemaker:InvokeEndpoint", "sagemaker:UpdateEndpointWeightsAndCapacities"]
    resources = [local.endpoints]
    condition {
      test     = "Null"
      variable = "aws:ResourceTag/cloudtrain:run"
      values   = ["false"]
    }
  }

  dynamic "statement" {
    for_each = { DeleteEndpointConfig = local.configs, DeleteModel = local.models }
    content {
      sid       = "${statement.key}OfCloudtrain"
      actions   = ["sagemaker:${statement.key}"]
      resources = [statement.value]
      condition {
        test     = "Null"
        variable = "aws:ResourceTag/cloudtrain:run"
        values   = ["false"]
      }
    }
  }

  statement {
    sid = "ScaleEndpoints"
    actions = [
      "application-autoscaling:DeregisterScalableTarget",
      "application-autoscaling:PutScalingPolicy",
      "application-autoscaling:RegisterScalableTarget",
    ]
    resources = ["arn:${local.partition}:application-autoscaling:${local.region}:${local.account}:scalable-target/*"]
    condition {
      test     = "StringEquals"
      variable = "application-autoscaling:service-namespace"
      values   = ["sagemaker"]
    }
  }

  # Application Auto Scaling creates and deletes the alarms of a target with the caller's credentials.
  statement {
    sid       = "AlarmsOfScaling"
    actions   = ["cloudwatch:DeleteAlarms", "cloudwatch:DescribeAlarms", "cloudwatch:PutMetricAlarm"]
    resources = ["arn:${local.partition}:cloudwatch:${local.region}:${local.account}:alarm:TargetTracking-endpoint/*"]
  }

  statement {
    sid       = "ServiceRoleOfScaling"
    actions   = ["iam:CreateServiceLinkedRole"]
    resources = ["arn:${local.partition}:iam::${local.account}:role/aws-service-role/sagemaker.application-autoscaling.amazonaws.com/*"]
    condition {
      test     = "StringEquals"
      variable = "iam:AWSServiceName"
      values   = ["sagemaker.application-autoscaling.amazonaws.com"]
    }
  }

  statement {
    sid       = "EncryptVolumesOfEndpoints"
    actions   = ["kms:CreateGrant"]
    resources = [aws_kms_key.this.arn]
    condition {
      test     = "Bool"
      variable = "kms:GrantIsForAWSResource"
      values   = ["true"]
    }
  }
}
