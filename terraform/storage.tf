# The bucket. Versioning stays off: every object is written once, and what is collected is garbage by
# proof; old versions would be paid for and read by nobody, and a version put back by hand would be a
# WAL number that means two things. Against the wrong command there is the backup of deploy/README.md.

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

# Nothing here expires or moves an object: what may be deleted is known to the log alone, and a WAL entry
# that a rule has taken is a hole. Uploads that were never completed are nobody's.
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
