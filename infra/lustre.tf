# A file system of objects below one prefix of the bucket, for those who want one. Off unless it is asked for.

resource "aws_fsx_lustre_file_system" "this" {
  count = var.lustre == null ? 0 : 1

  deployment_type             = "PERSISTENT_2"
  storage_type                = "SSD"
  storage_capacity            = var.lustre.capacity_gib
  per_unit_storage_throughput = var.lustre.throughput_mb_per_tib
  data_compression_type       = "LZ4"
  kms_key_id                  = aws_kms_key.this.arn
  subnet_ids                  = [local.subnet_ids[0]]
  security_group_ids          = local.security_group_ids # Lustre's ports are among "all traffic among themselves"
  tags                        = merge(local.tags, { Name = var.name })
}

resource "aws_fsx_data_repository_association" "this" {
  count = var.lustre == null ? 0 : 1

  file_system_id       = aws_fsx_lustre_file_system.this[0].id
  file_system_path     = "/${var.lustre.folder}"
  data_repository_path = "s3://${aws_s3_bucket.this.id}/${var.prefix}/${var.lustre.folder}"
  tags                 = local.tags

  # The events below are those of later changes: without it, what lies in the bucket already would not be seen.
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
