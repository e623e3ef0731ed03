# Tests of the plan without an account: `terraform test`. The mock provider generates ids.

mock_provider "aws" {
  mock_data "aws_caller_identity" {
    defaults = { account_id = "123456789012" }
  }
  mock_data "aws_partition" {
    defaults = { partition = "aws", dns_suffix = "amazonaws.com" }
  }
  mock_data "aws_region" {
    defaults = { id = "eu-central-1" }
  }
  mock_data "aws_availability_zones" {
    defaults = { names = ["eu-central-1c", "eu-central-1a", "eu-central-1b"] }
  }
  mock_data "aws_iam_policy_document" {
    defaults = { json = "{}" }
  }
}

# Values that exist only after an apply, but that the assertions need.
override_resource {
  target          = aws_sns_topic.alerts
  override_during = plan
  values          = { arn = "arn:aws:sns:eu-central-1:123456789012:cloudtrain-alerts" }
}

override_resource {
  target          = aws_s3_bucket.this
  override_during = plan
  values          = { id = "a-known-bucket", arn = "arn:aws:s3:::a-known-bucket" }
}

variables {
  budget_usd   = 500
  alert_emails = ["ada@example.com"]
}

run "defaults" {
  command = plan

  assert {
    condition     = keys(aws_subnet.private) == ["eu-central-1a", "eu-central-1b"]
    error_message = "Without zones, the first two zones of the region are used, in order."
  }
  assert {
    condition     = [for subnet in aws_subnet.private : subnet.cidr_block] == ["10.84.0.0/20", "10.84.16.0/20"]
    error_message = "Each subnet has a sixteenth of the network."
  }
  assert {
    condition     = length(aws_budgets_budget.this[0].notification) == 4
    error_message = "Three thresholds of what was spent and one of the forecast must send alerts."
  }
  assert {
    condition     = aws_kms_key.this.enable_key_rotation
    error_message = "The key changes every year."
  }
  assert {
    condition     = !aws_s3_bucket.this.force_destroy
    error_message = "A destroy must not delete checkpoints."
  }
  assert {
    condition     = length(aws_fsx_lustre_file_system.this) == 0 && output.lustre == null
    error_message = "Lustre must be created only on request."
  }
  assert {
    condition     = length(setintersection(["ec2messages", "lambda", "secretsmanager", "ssm", "ssmmessages"], keys(aws_vpc_endpoint.interface))) == 0
    error_message = "Endpoints of optional parts must be created only on request."
  }
  assert {
    condition     = length(aws_cloudwatch_event_rule.notify) == 0
    error_message = "Rules for topics must be created only on request."
  }
  assert {
    condition     = length(aws_lambda_function.recovery) + length(aws_cloudwatch_event_target.recovery) + length(aws_iam_role.recovery) == 0
    error_message = "The function must be created only on request."
  }
}

run "chosen_zones" {
  command = plan

  variables {
    availability_zones = ["eu-central-1c"]
    vpc_cidr           = "10.1.0.0/18"
  }

  assert {
    condition     = aws_subnet.private["eu-central-1c"].cidr_block == "10.1.0.0/22"
    error_message = "The subnet must be in the requested zone."
  }
}

run "secrets" {
  command = plan

  variables {
    secrets = ["arn:aws:secretsmanager:eu-central-1:123456789012:secret:wandb-a1B2c3"]
  }

  assert {
    condition     = contains(keys(aws_vpc_endpoint.interface), "secretsmanager")
    error_message = "A job in the private network must reach Secrets Manager."
  }
}

run "rights_of_single_fields" {
  command = plan

  variables {
    training_plans         = ["arn:aws:sagemaker:eu-central-1:123456789012:training-plan/november"]
    registry_functions     = ["arn:aws:lambda:eu-central-1:123456789012:function:registry:live"]
    allow_remote_debugging = true
  }

  assert {
    condition     = length(setsubtract(["ec2messages", "lambda", "ssm", "ssmmessages"], keys(aws_vpc_endpoint.interface))) == 0
    error_message = "A job in the private network must reach Lambda and Systems Manager."
  }
  assert {
    condition     = contains(flatten(data.aws_iam_policy_document.submit.statement[*].resources), "arn:aws:sagemaker:eu-central-1:123456789012:reserved-capacity/*")
    error_message = "A job of a training plan needs the plan's reserved capacities, too."
  }
}

run "existing_network" {
  command = plan

  variables {
    existing_vpc = {
      id              = "vpc-0123456789abcdef0"
      subnets         = ["subnet-0123456789abcdef0"]
      security_groups = ["sg-0123456789abcdef0"]
    }
  }

  assert {
    condition     = length(aws_vpc.this) + length(aws_subnet.private) + length(aws_security_group.jobs) + length(aws_vpc_endpoint.s3) + length(aws_vpc_endpoint.interface) == 0
    error_message = "In an existing network, existing resources must not be created."
  }
  assert {
    condition     = join(",", concat(output.subnets, output.security_groups)) == "subnet-0123456789abcdef0,sg-0123456789abcdef0"
    error_message = "Jobs must run in the given subnets."
  }
}

run "without_budget_and_watch" {
  command = plan

  variables {
    budget_usd     = null
    overlong_hours = null
  }

  assert {
    condition     = length(aws_budgets_budget.this) + length(aws_sfn_state_machine.overlong) + length(aws_iam_role.watch) == 0
    error_message = "null must create none of them."
  }
}

run "lustre" {
  command = plan

  variables {
    lustre = { capacity_gib = 4800, folder = "images" }
  }

  assert {
    condition     = aws_fsx_lustre_file_system.this[0].storage_capacity == 4800 && aws_fsx_lustre_file_system.this[0].deployment_type == "PERSISTENT_2"
    error_message = "The file system must have the requested size."
  }
  assert {
    condition     = aws_fsx_data_repository_association.this[0].data_repository_path == "s3://a-known-bucket/cloudtrain/images"
    error_message = "It must contain the objects below one folder of the prefix."
  }
  assert {
    condition     = output.lustre.folder == "images"
    error_message = "The output must name the folder that a job mounts."
  }
  assert {
    condition     = aws_fsx_data_repository_association.this[0].batch_import_meta_data_on_create
    error_message = "It must contain existing objects, too."
  }
}

run "notifications" {
  command = plan

  variables {
    notify_topics = ["arn:aws:sns:eu-central-1:123456789012:training"]
  }

  # The pattern has the role's ARN, which a plan does not know.
  override_resource {
    target          = aws_iam_role.execution
    override_during = plan
    values          = { arn = "arn:aws:iam::123456789012:role/cloudtrain-execution" }
  }

  assert {
    condition = jsondecode(aws_cloudwatch_event_rule.notify["arn:aws:sns:eu-central-1:123456789012:training"].event_pattern).detail.Tags == {
      "cloudtrain:notify" = ["arn:aws:sns:eu-central-1:123456789012:training"]
    }
    error_message = "The rule must match jobs that name the topic, and no others."
  }
  assert {
    condition     = aws_cloudwatch_event_target.notify["arn:aws:sns:eu-central-1:123456789012:training"].arn == "arn:aws:sns:eu-central-1:123456789012:training"
    error_message = "The rule must send to the topic."
  }
}

run "recovery" {
  command = plan

  variables {
    recovery_function = "main.tf"
  }

  # The pattern has the role's ARN, which a plan does not know.
  override_resource {
    target          = aws_iam_role.execution
    override_during = plan
    values          = { arn = "arn:aws:iam::123456789012:role/cloudtrain-execution" }
  }

  assert {
    condition     = jsondecode(aws_cloudwatch_event_rule.recovery_ended[0].event_pattern).detail.TrainingJobStatus == ["Completed", "Failed", "Stopped"]
    error_message = "The function must be called for each end of a job."
  }
  assert {
    condition     = keys(aws_cloudwatch_event_target.recovery) == keys(aws_lambda_permission.recovery)
    error_message = "Both rules must call the function, and only they may."
  }
  assert {
    condition     = aws_lambda_function.recovery[0].timeout < 300
    error_message = "A call must end before its lock expires."
  }
  assert {
    condition     = aws_cloudwatch_log_group.recovery[0].retention_in_days == 90
    error_message = "The log must expire."
  }
}

run "mistakes_are_refused" {
  command = plan

  variables {
    budget_usd              = -1
    alert_emails            = ["ada"]
    name                    = "My Team"
    prefix                  = "/cloudtrain/"
    transport               = "smtp"
    bucket_name             = "My_Bucket"
    bundle_days             = 30
    noncurrent_days         = 0
    incomplete_upload_days  = 1
    read_only_data          = ["my-bucket/train"]
    read_only_keys          = ["alias/data"]
    secrets                 = ["arn:aws:secretsmanager:us-west-2:123456789012:secret:*"]
    mlflow_servers          = ["https://mlflow.example.com"]
    mlflow_artifacts        = ["my-bucket/mlflow"]
    image_registry          = "aws"
    image_repositories      = ["train:latest"]
    submitter_roles         = ["arn:aws:iam::123456789012:role/ci"]
    instance_types          = ["p4d.24xlarge"]
    max_runtime_hours       = 1000
    job_queues              = ["training"]
    existing_vpc            = { id = "my-vpc", subnets = [], security_groups = ["default"] }
    availability_zones      = ["eu-central-1a", "eu-central-1a"]
    vpc_cidr                = "10.0.0.0/8"
    interface_endpoints     = ["https://sts.amazonaws.com"]
    training_plans          = ["november"]
    registry_functions      = ["registry"]
    budget_actual_percent   = [0]
    budget_forecast_percent = [-1]
    overlong_hours          = 0.5
    notify_topics           = ["training"]
    recovery_function       = "no-such.zip"
    lustre                  = { capacity_gib = 1000, throughput_mb_per_tib = 100, folder = "code" }
  }

  expect_failures = [
    var.budget_usd,
    var.alert_emails,
    var.name,
    var.prefix,
    var.transport,
    var.bucket_name,
    var.bundle_days,
    var.noncurrent_days,
    var.incomplete_upload_days,
    var.read_only_data,
    var.read_only_keys,
    var.secrets,
    var.mlflow_servers,
    var.mlflow_artifacts,
    var.image_registry,
    var.image_repositories,
    var.submitter_roles,
    var.instance_types,
    var.max_runtime_hours,
    var.job_queues,
    var.existing_vpc,
    var.availability_zones,
    var.vpc_cidr,
    var.interface_endpoints,
    var.training_plans,
    var.registry_functions,
    var.budget_actual_percent,
    var.budget_forecast_percent,
    var.overlong_hours,
    var.notify_topics,
    var.recovery_function,
    var.lustre,
  ]
}
