# The outputs are cloudtrain's settings, so that it can read `terraform output -json`, and what a job file names.

output "role" {
  description = "ARN of the execution role."
  value       = aws_iam_role.execution.arn
  depends_on  = [aws_iam_role_policy.execution]
}

output "bucket" {
  description = "Name of the S3 bucket for code, checkpoints and models."
  value       = aws_s3_bucket.this.id
}

output "prefix" {
  description = "Key prefix below which cloudtrain writes."
  value       = var.prefix
}

output "region" {
  description = "AWS region."
  value       = local.region
}

output "subnets" {
  description = "Private subnets that jobs run in."
  value       = local.subnet_ids
}

output "security_groups" {
  description = "Security groups of the jobs' hosts."
  value       = local.security_group_ids
}

output "kms_key" {
  description = "ARN of the key for volumes and outputs."
  value       = aws_kms_key.this.arn
}

output "transport" {
  description = "How jobs are sent: `estimator` or `boto3`."
  value       = var.transport
}

output "lustre" {
  description = "File system and mount name for a channel, such as `{fsx: <file_system>, path: <mount>/<folder>}`; `null` without `lustre`."
  value = var.lustre == null ? null : {
    file_system = aws_fsx_lustre_file_system.this[0].id
    mount       = "/${aws_fsx_lustre_file_system.this[0].mount_name}"
    folder      = var.lustre.folder
  }
}
