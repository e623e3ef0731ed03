variable "budget_usd" {
  description = "Monthly budget for SageMaker in US dollars. It sends warnings and stops no job. `null` creates no budget."
  type        = number

  validation {
    condition     = var.budget_usd == null ? true : var.budget_usd > 0
    error_message = "budget_usd must be more than 0, or null for no budget."
  }
}

variable "alert_emails" {
  description = "Email addresses for alerts about the budget and about jobs that did not complete. Each address must confirm."
  type        = set(string)

  validation {
    condition     = alltrue([for address in var.alert_emails : can(regex("^[^@\\s]+@[^@\\s]+\\.[^@\\s]+$", address))])
    error_message = "alert_emails must hold addresses such as ada@example.com."
  }

  validation {
    condition     = length(var.alert_emails) <= 10
    error_message = "AWS Budgets allows at most 10 addresses; name a mailing list."
  }
}

variable "name" {
  description = "Prefix of the names of all resources."
  type        = string
  default     = "cloudtrain"
  nullable    = false

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{1,30}[a-z0-9]$", var.name))
    error_message = "name must be 3 to 32 lowercase letters, digits and hyphens, and begin with a letter."
  }
}

variable "tags" {
  description = "Tags of all resources."
  type        = map(string)
  default     = {}
  nullable    = false
}

variable "prefix" {
  description = "Key prefix in the bucket below which cloudtrain writes."
  type        = string
  default     = "cloudtrain"
  nullable    = false

  validation {
    condition     = can(regex("^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9._-]+)*$", var.prefix))
    error_message = "prefix must be like cloudtrain or team/cloudtrain: no slash at the ends, no wildcards."
  }
}

variable "transport" {
  description = "How jobs are sent: `estimator` (SageMaker SDK) or `boto3`."
  type        = string
  default     = "estimator"
  nullable    = false

  validation {
    condition     = contains(["estimator", "boto3"], var.transport)
    error_message = "transport must be estimator or boto3."
  }
}

variable "bucket_name" {
  description = "Name of the bucket. `null` creates a random name."
  type        = string
  default     = null

  validation {
    condition     = var.bucket_name == null ? true : can(regex("^[a-z0-9][a-z0-9-]{1,61}[a-z0-9]$", var.bucket_name))
    error_message = "bucket_name must be 3 to 63 lowercase letters, digits and hyphens."
  }
}

variable "bundle_days" {
  description = "Days after which code and submit locks expire. A run whose code has expired cannot be resumed."
  type        = number
  default     = 180
  nullable    = false

  validation {
    # Code is uploaded again when it is 30 days old; a job may wait for 28 days and run for 28 days.
    condition     = var.bundle_days >= 90 && floor(var.bundle_days) == var.bundle_days
    error_message = "bundle_days must be an integer of at least 90: a job may wait and run for 56 days, and use code that is 30 days old."
  }
}

variable "noncurrent_days" {
  description = "Days for which replaced and deleted objects, such as pruned checkpoints, are kept and billed."
  type        = number
  default     = 7
  nullable    = false

  validation {
    condition     = var.noncurrent_days >= 1 && floor(var.noncurrent_days) == var.noncurrent_days
    error_message = "noncurrent_days must be an integer of at least 1."
  }
}

variable "incomplete_upload_days" {
  description = "Days after which the parts of incomplete uploads are deleted."
  type        = number
  default     = 7
  nullable    = false

  validation {
    condition     = var.incomplete_upload_days >= 2 && floor(var.incomplete_upload_days) == var.incomplete_upload_days
    error_message = "incomplete_upload_days must be an integer of at least 2: uploads in progress must not be deleted."
  }
}

variable "access_log_bucket" {
  description = "Bucket for S3 access logs. `null` writes no logs."
  type        = string
  default     = null
}

variable "force_destroy" {
  description = "Whether `terraform destroy` deletes the bucket with all checkpoints and models in it."
  type        = bool
  default     = false
  nullable    = false
}

variable "read_only_data" {
  description = "Data in other buckets that jobs may read: `s3://bucket/prefix`."
  type        = set(string)
  default     = []
  nullable    = false

  validation {
    condition     = alltrue([for uri in var.read_only_data : can(regex("^s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^*?]*)?$", uri))])
    error_message = "read_only_data must hold URIs such as s3://bucket/prefix, without wildcards."
  }
}

variable "read_only_keys" {
  description = "ARNs of the KMS keys of such data and of secrets."
  type        = set(string)
  default     = []
  nullable    = false

  validation {
    condition     = alltrue([for arn in var.read_only_keys : can(regex("^arn:aws[a-z-]*:kms:[a-z0-9-]+:[0-9]{12}:key/[A-Za-z0-9-]+$", arn))])
    error_message = "read_only_keys must hold ARNs of keys; policies cannot name an alias."
  }
}

variable "secrets" {
  description = "ARNs of the secrets in Secrets Manager that jobs may read."
  type        = set(string)
  default     = []
  nullable    = false

  validation {
    condition     = alltrue([for arn in var.secrets : can(regex("^arn:aws[a-z-]*:secretsmanager:[a-z0-9-]+:[0-9]{12}:secret:[^*]+$", arn))])
    error_message = "secrets must hold ARNs such as arn:aws:secretsmanager:us-west-2:123456789012:secret:name-AbCdEf."
  }
}

variable "mlflow_servers" {
  description = "ARNs of SageMaker's MLflow tracking servers and apps to which jobs may log."
  type        = set(string)
  default     = []
  nullable    = false

  validation {
    condition     = alltrue([for arn in var.mlflow_servers : can(regex("^arn:aws[a-z-]*:sagemaker:[a-z0-9-]+:[0-9]{12}:mlflow-(app|tracking-server)/[^*]+$", arn))])
    error_message = "mlflow_servers must hold ARNs such as arn:aws:sagemaker:us-west-2:123456789012:mlflow-tracking-server/team."
  }
}

variable "mlflow_artifacts" {
  description = "Folders of these servers' artifacts, which clients write themselves: `s3://bucket/prefix`."
  type        = set(string)
  default     = []
  nullable    = false

  validation {
    condition     = alltrue([for uri in var.mlflow_artifacts : can(regex("^s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^*?]*)?$", uri))])
    error_message = "mlflow_artifacts must hold URIs such as s3://bucket/prefix, without wildcards."
  }
}

variable "image_registry" {
  description = "Account of AWS's own container images. `null` uses the account for the region."
  type        = string
  default     = null

  validation {
    condition     = var.image_registry == null ? true : can(regex("^[0-9]{12}$", var.image_registry))
    error_message = "image_registry must be an account id of 12 digits."
  }
}

variable "image_repositories" {
  description = "ARNs of ECR repositories of your own images."
  type        = list(string)
  default     = []
  nullable    = false

  validation {
    condition     = alltrue([for arn in var.image_repositories : can(regex("^arn:aws[a-z-]*:ecr:[a-z0-9-]+:[0-9]{12}:repository/[a-z0-9._/-]+$", arn))])
    error_message = "image_repositories must hold ARNs such as arn:aws:ecr:us-west-2:123456789012:repository/train."
  }
}

variable "permissions_boundary" {
  description = "ARN of the permissions boundary of all created roles."
  type        = string
  default     = null
}

variable "submitter_roles" {
  description = "Names of roles of people and CI (with their paths, such as `ci/deploy`) that may submit."
  type        = set(string)
  default     = []
  nullable    = false

  validation {
    condition     = alltrue([for name in var.submitter_roles : can(regex("^([A-Za-z0-9+=,.@_-]+/)*[A-Za-z0-9+=,.@_-]+$", name))])
    error_message = "submitter_roles must hold names, not ARNs, without a slash at the ends."
  }
}

variable "instance_types" {
  description = "Instance types that jobs may use; `*` matches any size."
  type        = set(string)
  default     = ["ml.m5.*", "ml.g5.*", "ml.g6.*", "ml.g6e.*", "ml.p4d.24xlarge", "ml.p4de.24xlarge", "ml.p5.48xlarge"]
  nullable    = false

  validation {
    condition     = length(var.instance_types) > 0 && alltrue([for name in var.instance_types : can(regex("^ml\\.[a-z0-9-]+\\.([a-z0-9]+|\\*)$", name))])
    error_message = "instance_types must hold names such as ml.p4d.24xlarge or ml.g5.*."
  }
}

variable "max_runtime_hours" {
  description = "Longest run time of a job, in hours."
  type        = number
  default     = 120
  nullable    = false

  validation {
    condition     = var.max_runtime_hours >= 1 && var.max_runtime_hours <= 672
    error_message = "max_runtime_hours must be between 1 and 672 (28 days, SageMaker's own limit)."
  }
}

variable "require_traffic_encryption" {
  description = "Whether jobs must encrypt the traffic between their hosts (`cluster.network.encrypt_traffic`), which slows it down."
  type        = bool
  default     = false
  nullable    = false
}

variable "job_queues" {
  description = "ARNs of AWS Batch job queues that runs may wait in. Batch creates the job with its own role, so the submit policy's limits on types, hours, network and keys do not apply: add queues only if you trust all submitters with that."
  type        = list(string)
  default     = []
  nullable    = false

  validation {
    condition     = alltrue([for arn in var.job_queues : can(regex("^arn:aws[a-z-]*:batch:[a-z0-9-]+:[0-9]{12}:job-queue/[A-Za-z0-9_-]+$", arn))])
    error_message = "job_queues must hold ARNs such as arn:aws:batch:us-west-2:123456789012:job-queue/training."
  }
}

variable "training_plans" {
  description = "ARNs of SageMaker training plans that jobs may use (`cluster.training_plan`); `.../training-plan/*` allows all. Such a plan is paid in advance."
  type        = set(string)
  default     = []
  nullable    = false

  validation {
    condition     = alltrue([for arn in var.training_plans : can(regex("^arn:aws[a-z-]*:sagemaker:[a-z0-9-]+:[0-9]{12}:training-plan/([A-Za-z0-9-]+|\\*)$", arn))])
    error_message = "training_plans must hold ARNs such as arn:aws:sagemaker:us-west-2:123456789012:training-plan/november."
  }
}

variable "registry_functions" {
  description = "ARNs of the Lambda functions that give SageMaker the credentials of private registries (`cluster.image.private_registry`)."
  type        = set(string)
  default     = []
  nullable    = false

  validation {
    condition     = alltrue([for arn in var.registry_functions : can(regex("^arn:aws[a-z-]*:lambda:[a-z0-9-]+:[0-9]{12}:function:[A-Za-z0-9_-]+(:[A-Za-z0-9_-]+)?$", arn))])
    error_message = "registry_functions must hold ARNs such as arn:aws:lambda:us-west-2:123456789012:function:registry."
  }
}

variable "allow_remote_debugging" {
  description = "Whether submitters may open a shell in the containers of training jobs through AWS Systems Manager (`cluster.remote_debug`). A shell has all rights of the execution role."
  type        = bool
  default     = false
  nullable    = false
}

variable "allow_endpoints" {
  description = "Whether submitters may also deploy models: a policy to create, invoke and delete endpoints on `instance_types`. An endpoint is billed until someone deletes it."
  type        = bool
  default     = false
  nullable    = false
}

variable "existing_vpc" {
  description = "Existing network to use instead of a new one. Without `security_groups`, one is created in it."
  type = object({
    id              = string
    subnets         = list(string)
    security_groups = optional(list(string), [])
  })
  default = null

  validation {
    condition     = var.existing_vpc == null ? true : can(regex("^vpc-[0-9a-f]+$", var.existing_vpc.id))
    error_message = "existing_vpc.id must be like vpc-0123456789abcdef0."
  }

  validation {
    condition     = var.existing_vpc == null ? true : length(var.existing_vpc.subnets) > 0 && alltrue([for id in var.existing_vpc.subnets : can(regex("^subnet-[0-9a-f]+$", id))])
    error_message = "existing_vpc.subnets must hold at least one id such as subnet-0123456789abcdef0."
  }

  validation {
    condition     = var.existing_vpc == null ? true : alltrue([for id in var.existing_vpc.security_groups : can(regex("^sg-[0-9a-f]+$", id))])
    error_message = "existing_vpc.security_groups must hold ids such as sg-0123456789abcdef0."
  }
}

variable "availability_zones" {
  description = "Zones of the created subnets; choose those with capacity for your instances. Empty uses the first two of the region."
  type        = list(string)
  default     = []
  nullable    = false

  validation {
    condition     = length(var.availability_zones) <= 16 && length(distinct(var.availability_zones)) == length(var.availability_zones)
    error_message = "availability_zones must hold at most 16 zones, each once."
  }
}

variable "vpc_cidr" {
  description = "Addresses of the created network; each subnet gets a sixteenth."
  type        = string
  default     = "10.84.0.0/16"
  nullable    = false

  validation {
    condition     = can(cidrnetmask(var.vpc_cidr)) && try(tonumber(split("/", var.vpc_cidr)[1]) >= 16 && tonumber(split("/", var.vpc_cidr)[1]) <= 22, false)
    error_message = "vpc_cidr must be an IPv4 network from /16 to /22, such as 10.84.0.0/16."
  }
}

variable "interface_endpoints" {
  description = "AWS services that jobs reach without the internet, besides S3 and those that `secrets`, `registry_functions` and `allow_remote_debugging` need. Each is billed by the hour and zone."
  type        = set(string)
  default     = ["ecr.api", "ecr.dkr", "logs", "sagemaker.api", "sts"]
  nullable    = false

  validation {
    condition     = alltrue([for name in var.interface_endpoints : can(regex("^[a-z][a-z0-9.-]*$", name))])
    error_message = "interface_endpoints must hold names of services such as sts or ecr.api."
  }
}

variable "budget_actual_percent" {
  description = "Alert thresholds of the actual cost, in percent of the budget."
  type        = list(number)
  default     = [50, 80, 100]
  nullable    = false

  validation {
    condition     = length(var.budget_actual_percent) <= 5 && alltrue([for percent in var.budget_actual_percent : percent > 0 && percent <= 1000])
    error_message = "budget_actual_percent must hold at most 5 numbers above 0 and up to 1000; AWS allows 10 thresholds per budget."
  }
}

variable "budget_forecast_percent" {
  description = "Alert thresholds of the forecast cost of the month, in percent of the budget."
  type        = list(number)
  default     = [100]
  nullable    = false

  validation {
    condition     = length(var.budget_forecast_percent) <= 5 && alltrue([for percent in var.budget_forecast_percent : percent > 0 && percent <= 1000])
    error_message = "budget_forecast_percent must hold at most 5 numbers above 0 and up to 1000; AWS allows 10 thresholds per budget."
  }
}

variable "overlong_hours" {
  description = "Hours of training after which an alert is sent. `null` sends none."
  type        = number
  default     = 24

  validation {
    condition     = var.overlong_hours == null ? true : var.overlong_hours >= 1 && floor(var.overlong_hours) == var.overlong_hours
    error_message = "overlong_hours must be an integer of at least 1, or null."
  }
}

variable "notify_topics" {
  description = "ARNs of the SNS topics that jobs may name in `notify`. Their policies must allow `events.amazonaws.com` to publish."
  type        = set(string)
  default     = []
  nullable    = false

  validation {
    condition     = alltrue([for arn in var.notify_topics : can(regex("^arn:aws[a-z-]*:sns:[a-z0-9-]+:[0-9]{12}:[A-Za-z0-9_-]{1,30}$", arn))])
    error_message = "notify_topics must hold ARNs such as arn:aws:sns:us-west-2:123456789012:training, with names of at most 30 characters."
  }
}

variable "recovery_function" {
  description = "Zip with the code of the function that continues runs with `limits.recover` in the account; `make recovery-function` builds it. `null` creates no function."
  type        = string
  default     = null

  validation {
    condition     = var.recovery_function == null ? true : fileexists(var.recovery_function)
    error_message = "recovery_function must be the path of the zip that `make recovery-function` builds."
  }
}

variable "lustre" {
  description = "File system with the objects below `<prefix>/<folder>/` in the bucket. `null` creates none."
  type = object({
    capacity_gib          = optional(number, 1200)
    throughput_mb_per_tib = optional(number, 250)
    folder                = optional(string, "data")
  })
  default = null

  validation {
    condition     = var.lustre == null ? true : var.lustre.capacity_gib == 1200 || (var.lustre.capacity_gib > 0 && var.lustre.capacity_gib % 2400 == 0)
    error_message = "lustre.capacity_gib must be 1200 or a multiple of 2400."
  }

  validation {
    condition     = var.lustre == null ? true : contains([125, 250, 500, 1000], var.lustre.throughput_mb_per_tib)
    error_message = "lustre.throughput_mb_per_tib must be 125, 250, 500 or 1000."
  }

  validation {
    condition     = var.lustre == null ? true : can(regex("^[A-Za-z0-9][A-Za-z0-9._-]*$", var.lustre.folder)) && !contains(["chains", "code", "queues", "requests", "sweeps"], var.lustre.folder)
    error_message = "lustre.folder must be one name, and none of chains, code, queues, requests and sweeps, which cloudtrain uses."
  }
}
