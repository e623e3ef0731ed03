# Account, region and names that the other files use.

data "aws_caller_identity" "current" {}

data "aws_partition" "current" {}

data "aws_region" "current" {}

# Random suffix, created once, so that the bucket's name cannot be guessed or taken by others.
resource "terraform_data" "suffix" {
  input = substr(replace(uuid(), "-", ""), 0, 16)

  lifecycle {
    ignore_changes = [input]
  }
}

locals {
  account   = data.aws_caller_identity.current.account_id
  partition = data.aws_partition.current.partition
  region    = data.aws_region.current.id
  dns       = data.aws_partition.current.dns_suffix

  training_jobs = "arn:${local.partition}:sagemaker:${local.region}:${local.account}:training-job"
  tuning_jobs   = "arn:${local.partition}:sagemaker:${local.region}:${local.account}:hyper-parameter-tuning-job"
  log_group     = "/aws/sagemaker/TrainingJobs" # the log group of SageMaker, which no setting changes
  log_group_arn = "arn:${local.partition}:logs:${local.region}:${local.account}:log-group:${local.log_group}"

  objects = "${aws_s3_bucket.this.arn}/${var.prefix}"

  # ARNs of data: buckets to list, and objects below the prefixes to read.
  data_buckets = [for uri in var.read_only_data : "arn:${local.partition}:s3:::${split("/", trimprefix(uri, "s3://"))[0]}"]
  data_objects = [
    for uri in var.read_only_data :
    "arn:${local.partition}:s3:::${trimsuffix(trimprefix(uri, "s3://"), "/")}/*"
  ]

  # Accounts of AWS's own container images, as in cloudtrain's catalog. The default is that of all other regions.
  image_registry = coalesce(var.image_registry, lookup(local.image_registries, local.region, "763104351884"))
  image_registries = {
    "af-south-1"      = "626614931356"
    "ap-east-1"       = "871362719292"
    "ap-east-2"       = "975050140332"
    "ap-northeast-3"  = "364406365360"
    "ap-south-2"      = "772153158452"
    "ap-southeast-3"  = "907027046896"
    "ap-southeast-4"  = "457447274322"
    "ap-southeast-5"  = "550225433462"
    "ap-southeast-6"  = "633930458069"
    "ap-southeast-7"  = "590183813437"
    "ca-west-1"       = "204538143572"
    "cn-north-1"      = "727897471807"
    "cn-northwest-1"  = "727897471807"
    "eu-central-2"    = "380420809688"
    "eu-isoe-west-1"  = "371248457586"
    "eu-south-1"      = "692866216735"
    "eu-south-2"      = "503227376785"
    "eusc-de-east-1"  = "204133271717"
    "il-central-1"    = "780543022126"
    "me-central-1"    = "914824155844"
    "me-south-1"      = "217643126080"
    "me-west-1"       = "124382933778"
    "mx-central-1"    = "637423239942"
    "us-gov-east-1"   = "446045086412"
    "us-gov-west-1"   = "442386744353"
    "us-iso-east-1"   = "886529160074"
    "us-isob-east-1"  = "094389454867"
    "us-isof-east-1"  = "303241398832"
    "us-isof-south-1" = "454834333376"
  }

  image_repositories = concat(
    [
      for name in ["pytorch", "pytorch-training"] :
      "arn:${local.partition}:ecr:${local.region}:${local.image_registry}:repository/${name}"
    ],
    var.image_repositories,
  )

  # AWS's images of endpoints: Ray Serve and vLLM.
  serving_repositories = [
    for name in var.allow_endpoints ? ["ray", "vllm"] : [] :
    "arn:${local.partition}:ecr:${local.region}:${local.image_registry}:repository/${name}"
  ]

  tags = merge({ "cloudtrain:stack" = var.name }, var.tags)
}
