# Outputs that cloudtrain reads.

output "role" {
  value = module.cloudtrain.role
}

output "bucket" {
  value = module.cloudtrain.bucket
}

output "prefix" {
  value = module.cloudtrain.prefix
}

output "region" {
  value = module.cloudtrain.region
}

output "subnets" {
  value = module.cloudtrain.subnets
}

output "security_groups" {
  value = module.cloudtrain.security_groups
}

output "kms_key" {
  value = module.cloudtrain.kms_key
}

output "transport" {
  value = module.cloudtrain.transport
}
