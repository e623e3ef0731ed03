# A team with its own network and CI: fewer instance types, another team's data, a secret, an image.

variable "vpc" {
  description = "Existing network and its private subnets for jobs."
  type = object({
    id      = string
    subnets = list(string)
  })
}

variable "ci_role" {
  description = "Name of the role with which CI submits."
  type        = string
}

data "aws_caller_identity" "current" {}

data "aws_region" "current" {}

locals {
  here = "${data.aws_region.current.id}:${data.aws_caller_identity.current.account_id}"
}

module "cloudtrain" {
  source = "../.."

  name         = "vision-training"
  prefix       = "vision"
  budget_usd   = 20000
  alert_emails = ["vision@example.com"]

  existing_vpc    = var.vpc
  submitter_roles = [var.ci_role]

  instance_types             = ["ml.g5.12xlarge", "ml.m5.2xlarge", "ml.p4d.24xlarge"]
  max_runtime_hours          = 72
  overlong_hours             = 48
  require_traffic_encryption = true

  read_only_data     = ["s3://example-images/train"]
  secrets            = ["arn:aws:secretsmanager:${local.here}:secret:wandb-a1B2c3"]
  mlflow_servers     = ["arn:aws:sagemaker:${local.here}:mlflow-app/app-ABCDEFGHIJKL"]
  mlflow_artifacts   = ["s3://example-mlflow/vision"]
  image_repositories = ["arn:aws:ecr:${local.here}:repository/train"]

  tags = { team = "vision" }
}
