# Optional FSx for Lustre file system with the objects below one prefix of the bucket.

resource "aws_fsx_lustre_file_system" "this" {
  count = var.lustre == null ? 0 : 1

  deployment_type             = "PERSISTENT_2"
  storage_type                = "SSD"
  storage_capacity            = var.lustre.capacity_gib
  per_unit_storage_throughput = var.lustre.throughput_mb_per_tib
  data_compression_type       = "LZ4"
  kms_key_id                  = aws_kms_key.this.arn
  subnet_ids                  = [local.subnet_ids[0]]
  security_group_ids          = local.security_group_ids # the rule for all traffic between members includes Lustre's ports
  tags                        = merge(local.tags, { Name = var.name })
}

resource "aws_fsx_data_repository_association" "this" {
  count = var.lustre == null ? 0 : 1

  file_system_id       = aws_fsx_lustre_file_system.this[0].id
  file_system_path     = "/${var.lustre.folder}"
  data_repository_path = "s3://${aws_s3_bucket.this.id}/${var.prefix}/${var.lustre.folder}"
  tags                 = local.tags

  # Imports existing objects; the events below cover only later changes.
  batch_import_meta_data_on_create = true

  s3 {
    auto_import_policy {
      events = ["NEW", "CHANGED", "DELETED"]
    }
    auto_export_policy {
      events = ["NEW", "CHANGED", "DELETED"]
    }
  }
}
