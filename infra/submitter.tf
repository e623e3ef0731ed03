# Policies of people and CI: start jobs with this role, in these subnets, with this key, on these instances.
# One policy changes resources and the other only reads, because IAM limits a policy to 6,144 characters.

resource "aws_iam_policy" "submit" {
  name        = "${var.name}-submit"
  description = "Start and stop training jobs with the role ${aws_iam_role.execution.name}, within its limits"
  policy      = data.aws_iam_policy_document.submit.json
  tags        = local.tags
}

resource "aws_iam_policy" "look" {
  name        = "${var.name}-look"
  description = "Follow training jobs, and check the account before a submit; changes nothing"
  policy      = data.aws_iam_policy_document.look.json
  tags        = local.tags
}

resource "aws_iam_role_policy_attachment" "submitters" {
  for_each = {
    for pair in setproduct(var.submitter_roles, ["submit", "look"]) : "${pair[0]}:${pair[1]}" => pair
  }

  role       = reverse(split("/", each.value[0]))[0]
  policy_arn = each.value[1] == "submit" ? aws_iam_policy.submit.arn : aws_iam_policy.look.arn
}

locals {
  # Types with hardware-encrypted local disks: SageMaker rejects a key for their volumes.
  with_local_disks = [
    for name in var.instance_types : name
    if can(regex("^ml\\.(p3dn|p4|p5|p6|g4dn|g5|g6|gr6|g7|trn|[a-z]+[0-9]+[a-z]*d)[a-z0-9-]*\\.", name))
  ]
  with_volumes = setsubtract(var.instance_types, local.with_local_disks)

  # A job uses types of one of these groups. Each statement needs all conditions: a key without a condition is not checked.
  groups_of_types = { for key, types in { LocalDisks = local.with_local_disks, Volumes = local.with_volumes } : key => types if length(types) > 0 }

  # IAM derives the same keys from a training job and from the definition of a tuning job's training jobs.
  creations = merge([
    for group, types in local.groups_of_types : {
      "CreateWith${group}" = { types = types, action = "CreateTrainingJob", jobs = local.training_jobs, has_volumes = group == "Volumes" }
      "TuneWith${group}"   = { types = types, action = "CreateHyperParameterTuningJob", jobs = local.tuning_jobs, has_volumes = group == "Volumes" }
    }
  ]...)

  reserved_capacities = "arn:${local.partition}:sagemaker:${local.region}:${local.account}:reserved-capacity/*"

  submitter_role_arns = [for name in var.submitter_roles : "arn:${local.partition}:iam::${local.account}:role/${name}"]
}

# What a job must be like, by the action that creates it. The function in recovery.tf has the same limits.
data "aws_iam_policy_document" "creations" {
  for_each = toset(["CreateHyperParameterTuningJob", "CreateTrainingJob"])

  dynamic "statement" {
    for_each = { for sid, creation in local.creations : sid => creation if creation.action == each.key }
    content {
      sid       = statement.key
      actions   = ["sagemaker:${statement.value.action}"]
      resources = ["${statement.value.jobs}/*"]

      condition {
        test     = "ForAllValues:StringLike"
        variable = "sagemaker:InstanceTypes"
        values   = statement.value.types
      }
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
        for_each = ["InstanceTypes", "VpcSecurityGroupIds", "VpcSubnets"]
        content {
          test     = "Null"
          variable = "sagemaker:${condition.value}"
          values   = ["false"]
        }
      }
      condition {
        test     = "ArnEquals"
        variable = "sagemaker:OutputKmsKeyArn"
        values   = [aws_kms_key.this.arn]
      }
      dynamic "condition" {
        for_each = statement.value.has_volumes ? [1] : []
        content {
          test     = "ArnEquals"
          variable = "sagemaker:VolumeKmsKeyArn"
          values   = [aws_kms_key.this.arn]
        }
      }
      dynamic "condition" {
        for_each = var.require_traffic_encryption ? [1] : []
        content {
          test     = "Bool"
          variable = "sagemaker:InterContainerTrafficEncryption"
          values   = ["true"]
        }
      }
      condition {
        test     = "NumericLessThanEquals"
        variable = "sagemaker:MaxRuntimeInSeconds"
        values   = [var.max_runtime_hours * 3600]
      }
    }
  }
}

data "aws_iam_policy_document" "submit" {
  source_policy_documents = [
    for action in ["CreateTrainingJob", "CreateHyperParameterTuningJob"] : data.aws_iam_policy_document.creations[action].json
  ]

  # AWS decides about a plan's job on three kinds of resources. The limits of the job are those of the statements above:
  # without the right to create the job itself, this one allows nothing. The names of reserved capacities are random.
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
    sid       = "TagTuningJobsAsTheyAreMade"
    actions   = ["sagemaker:AddTags"]
    resources = ["${local.tuning_jobs}/*"]
    condition {
      test     = "StringEquals"
      variable = "sagemaker:TaggingAction"
      values   = ["CreateHyperParameterTuningJob"]
    }
  }

  # Jobs of cloudtrain have this tag from their creation, and these policies cannot add it to other jobs.
  statement {
    sid       = "EndJobsOfCloudtrain"
    actions   = ["sagemaker:StopTrainingJob", "sagemaker:UpdateTrainingJob"]
    resources = ["${local.training_jobs}/*"]
    condition {
      test     = "Null"
      variable = "aws:ResourceTag/cloudtrain:job"
      values   = ["false"]
    }
  }

  statement {
    sid       = "EndTuningJobsOfCloudtrain"
    actions   = ["sagemaker:StopHyperParameterTuningJob"]
    resources = ["${local.tuning_jobs}/*"]
    condition {
      test     = "Null"
      variable = "aws:ResourceTag/cloudtrain:job"
      values   = ["false"]
    }
  }

  statement {
    sid       = "Upload"
    actions   = ["s3:AbortMultipartUpload", "s3:PutObject"]
    resources = ["${local.objects}/*"]
  }

  # For the volumes of a job, SageMaker creates the grant with the execution role, so submitters need no kms:CreateGrant.
  statement {
    sid       = "EncryptUploads"
    actions   = ["kms:Decrypt", "kms:GenerateDataKey"] # completing a multipart upload decrypts its parts
    resources = [aws_kms_key.this.arn]
    condition {
      test     = "StringEquals"
      variable = "kms:ViaService"
      values   = ["s3.${local.region}.${local.dns}"]
    }
  }

  dynamic "statement" {
    for_each = length(var.job_queues) == 0 ? [] : [1]
    content {
      sid       = "UseJobQueues"
      actions   = ["batch:SubmitServiceJob"]
      resources = concat(var.job_queues, [for arn in var.job_queues : "${arn}/quota-share/*"])
    }
  }

  dynamic "statement" {
    for_each = length(var.job_queues) == 0 ? [] : [1]
    content {
      sid       = "UseServiceJobs"
      actions   = ["batch:SubmitServiceJob", "batch:TagResource", "batch:TerminateServiceJob"]
      resources = ["arn:${local.partition}:batch:${local.region}:${local.account}:service-job/*"]
    }
  }

  # A training container has no ARN in Systems Manager, so the condition restricts the target (SageMaker AI developer guide,
  # "Access a training container through AWS Systems Manager for remote debugging").
  dynamic "statement" {
    for_each = var.allow_remote_debugging ? {
      OpenShells = { action = "StartSession", resource = "*" }
      EndShells  = { action = "TerminateSession", resource = "arn:${local.partition}:ssm:${local.region}:${local.account}:session/*" }
    } : {}
    content {
      sid       = statement.key
      actions   = ["ssm:${statement.value.action}"]
      resources = [statement.value.resource]
      condition {
        test     = "StringLike"
        variable = "ssm:resourceTag/aws:ssmmessages:target-id"
        values   = ["sagemaker-training-job:*"]
      }
    }
  }
}

data "aws_iam_policy_document" "look" {
  statement {
    sid       = "FollowJobs"
    actions   = ["sagemaker:DescribeTrainingJob", "sagemaker:ListTags"]
    resources = ["${local.training_jobs}/*"]
  }

  statement {
    sid       = "FollowTuningJobs"
    actions   = ["sagemaker:DescribeHyperParameterTuningJob", "sagemaker:ListTrainingJobsForHyperParameterTuningJob"]
    resources = ["${local.tuning_jobs}/*"]
  }

  dynamic "statement" {
    for_each = var.allow_endpoints ? {
      LookAtEndpoints      = { actions = ["sagemaker:DescribeEndpoint", "sagemaker:ListTags"], resource = local.endpoints }
      LookAtConfigurations = { actions = ["sagemaker:DescribeEndpointConfig"], resource = local.configs }
      LookAtModels         = { actions = ["sagemaker:DescribeModel"], resource = local.models }
    } : {}
    content {
      sid       = statement.key
      actions   = statement.value.actions
      resources = [statement.value.resource]
    }
  }

  statement {
    sid       = "LookAtTrainingPlans"
    actions   = ["sagemaker:DescribeTrainingPlan"]
    resources = ["arn:${local.partition}:sagemaker:${local.region}:${local.account}:training-plan/*"]
  }

  statement {
    sid       = "LookAtLustre"
    actions   = ["fsx:DescribeFileSystems"]
    resources = ["arn:${local.partition}:fsx:${local.region}:${local.account}:file-system/*"]
  }

  statement {
    sid       = "LookAtEfs"
    actions   = ["elasticfilesystem:DescribeMountTargetSecurityGroups", "elasticfilesystem:DescribeMountTargets"]
    resources = ["arn:${local.partition}:elasticfilesystem:${local.region}:${local.account}:file-system/*"]
  }

  # These actions have no resource ARNs.
  statement {
    sid = "FindAndCheck"
    actions = concat(
      [
        "ec2:DescribeNetworkInterfaces",
        "ec2:DescribeRouteTables",
        "ec2:DescribeSecurityGroups",
        "ec2:DescribeSubnets",
        "ec2:DescribeVpcEndpoints",
        "events:ListRuleNamesByTarget",
        "pricing:GetProducts",
        "sagemaker:ListTrainingJobs",
        "sagemaker:Search",
        "servicequotas:ListAWSDefaultServiceQuotas",
        "servicequotas:ListServiceQuotas",
      ],
      length(var.job_queues) == 0 ? [] : [
        "batch:DescribeJobQueues",
        "batch:DescribeServiceEnvironments",
        "batch:DescribeServiceJob",
        "batch:ListServiceJobs",
      ],
      var.allow_endpoints ? [
        "application-autoscaling:DescribeScalableTargets",
        "cloudwatch:GetMetricStatistics",
        "sagemaker:ListEndpointConfigs",
        "sagemaker:ListEndpoints",
        "sagemaker:ListModels",
      ] : [],
    )
    resources = ["*"]
  }

  dynamic "statement" {
    for_each = length(var.job_queues) == 0 ? [] : [1]
    content {
      sid       = "LookIntoQueues"
      actions   = ["batch:GetJobQueueSnapshot"]
      resources = var.job_queues
    }
  }

  statement {
    sid       = "ReadLogs"
    actions   = ["logs:DescribeLogStreams", "logs:GetLogEvents"]
    resources = ["${local.log_group_arn}:*"]
  }

  statement {
    sid       = "LookAtBucket"
    actions   = ["s3:GetBucketPolicy", "s3:ListBucket"]
    resources = concat([aws_s3_bucket.this.arn], local.data_buckets)
  }

  # In other buckets, read only what is needed to check whether a job can resume from a checkpoint.
  statement {
    sid       = "ReadResults"
    actions   = ["s3:GetObject"]
    resources = concat(["${local.objects}/*"], [for place in local.data_objects : "${place}/manifest.json"])
  }

  statement {
    sid       = "DecryptResults"
    actions   = ["kms:Decrypt"]
    resources = concat([aws_kms_key.this.arn], tolist(var.read_only_keys))
    condition {
      test     = "StringEquals"
      variable = "kms:ViaService"
      values   = ["s3.${local.region}.${local.dns}"]
    }
  }

  # Checks whether a secret exists; only the role may read its value.
  dynamic "statement" {
    for_each = length(var.secrets) == 0 ? [] : [1]
    content {
      sid       = "LookForSecrets"
      actions   = ["secretsmanager:DescribeSecret"]
      resources = var.secrets
    }
  }

  statement {
    sid       = "LookAtImages"
    actions   = ["ecr:BatchGetImage"]
    resources = local.image_repositories
  }

  statement {
    sid       = "LookAtRoles"
    actions   = ["iam:GetRole"]
    resources = concat([aws_iam_role.execution.arn], local.submitter_role_arns)
  }

  # Users may simulate their own policies; roles only those of the roles named here.
  statement {
    sid     = "AskWhatIsAllowed"
    actions = ["iam:SimulatePrincipalPolicy"]
    resources = concat(
      [aws_iam_role.execution.arn, "arn:${local.partition}:iam::${local.account}:user/$${aws:username}"],
      local.submitter_role_arns,
    )
  }

  statement {
    sid       = "LookAtBudgets"
    actions   = ["budgets:ViewBudget"]
    resources = ["arn:${local.partition}:budgets::${local.account}:budget/*"]
  }
}
