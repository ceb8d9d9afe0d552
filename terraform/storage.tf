# The bucket. Versioning stays off: objects are written once, and collection deletes only proven garbage, so
# old versions would cost money without use. An old version restored by hand could make two WAL entries of
# one sequence number. Backups protect against mistakes of operators: see deploy/README.md.

resource "aws_s3_bucket" "log" {
  bucket        = local.bucket
  force_destroy = !var.is_protected
  tags          = local.tags
}

resource "aws_s3_bucket_ownership_controls" "log" {
  bucket = aws_s3_bucket.log.id

  rule {
    object_ownership = "BucketOwnerEnforced"
  }
}

resource "aws_s3_bucket_public_access_block" "log" {
  bucket                  = aws_s3_bucket.log.id
  block_public_acls       = true
  block_public_policy     = true
  ignore_public_acls      = true
  restrict_public_buckets = true
}

resource "aws_s3_bucket_server_side_encryption_configuration" "log" {
  bucket = aws_s3_bucket.log.id

  rule {
    bucket_key_enabled = var.kms_key_arn != ""

    apply_server_side_encryption_by_default {
      sse_algorithm     = var.kms_key_arn == "" ? "AES256" : "aws:kms"
      kms_master_key_id = var.kms_key_arn == "" ? null : var.kms_key_arn
    }
  }
}

# No rule expires or moves an object: only the log can prove that an object is garbage, and a WAL entry that
# a rule deletes leaves a gap. The only rule ends multipart uploads that were never completed.
resource "aws_s3_bucket_lifecycle_configuration" "log" {
  bucket = aws_s3_bucket.log.id

  rule {
    id     = "abort-incomplete-uploads"
    status = "Enabled"

    filter {}

    abort_incomplete_multipart_upload {
      days_after_initiation = 1
    }
  }
}

resource "aws_s3_bucket_policy" "log" {
  bucket = aws_s3_bucket.log.id
  policy = templatefile("${path.module}/policies/bucket.json.tftpl", {
    bucket_arn        = aws_s3_bucket.log.arn
    prefix            = var.prefix
    is_wal_write_once = var.is_wal_write_once
  })

  depends_on = [aws_s3_bucket_public_access_block.log]
}

# Requests and errors of the prefix in CloudWatch, for the alarms.
resource "aws_s3_bucket_metric" "log" {
  bucket = aws_s3_bucket.log.id
  name   = var.name

  filter {
    prefix = "${var.prefix}/"
  }
}
