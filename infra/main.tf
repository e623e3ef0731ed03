# What the other files share: where we are, and the names of things.

data "aws_caller_identity" "current" {}

data "aws_partition" "current" {}

data "aws_region" "current" {}

# Random, and drawn once: nobody can take the bucket's name first, nor find it by trying.
resource "terraform_data" "suffix" {
  input = substr(replace(uuid(), "-", ""), 0, 16)

  lifecycle {
    ignore_changes = [input]
  }
}

locals {
  account   = data.aws_caller_identity.current.account_id
  partition = data.aws_partition.current.partition
  region    = data.aws_region.current.name
  dns       = data.aws_partition.current.dns_suffix

  training_jobs = "arn:${local.partition}:sagemaker:${local.region}:${local.account}:training-job"
  log_group     = "/aws/sagemaker/TrainingJobs" # where SageMaker writes; no setting of a job changes it
  log_group_arn = "arn:${local.partition}:logs:${local.region}:${local.account}:log-group:${local.log_group}"

  objects = "${aws_s3_bucket.this.arn}/${var.prefix}"

  # Places of data as ARNs: whole buckets to list, objects below the prefixes to read.
  data_buckets = [for uri in var.read_only_data : "arn:${local.partition}:s3:::${split("/", trimprefix(uri, "s3://"))[0]}"]
  data_objects = [
    for uri in var.read_only_data :
    "arn:${local.partition}:s3:::${trimsuffix(trimprefix(uri, "s3://"), "/")}/*"
  ]

  image_repositories = concat(
    [
      for name in ["pytorch", "pytorch-training"] :
      "arn:${local.partition}:ecr:${local.region}:${var.image_registry}:repository/${name}"
    ],
    var.image_repositories,
  )

  tags = merge({ "cloudtrain:stack" = var.name }, var.tags)
}
