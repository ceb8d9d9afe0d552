# A tidelog cluster on AWS: a bucket, brokers on Fargate behind a balancer, scheduled maintenance. Each part
# has a file: storage, iam, network, balancer, brokers, maintain, spark, alarms.

data "aws_caller_identity" "current" {}

data "aws_region" "current" {}

data "aws_partition" "current" {}

locals {
  account = data.aws_caller_identity.current.account_id
  region  = data.aws_region.current.region
  bucket  = var.bucket_name != "" ? var.bucket_name : "${var.name}-${local.account}"
  store   = "s3://${local.bucket}/${var.prefix}"
  tags    = merge(var.tags, { "tidelog:cluster" = var.name })

  http_port = 8082
  peer_port = 8083

  environment = merge(
    # Without security, a broker answers under no other public name. If the balancer has a certificate,
    # set this variable in `settings` to the name in the certificate.
    { TIDELOG_ALLOWED_HOSTS = aws_lb.brokers.dns_name },
    var.settings,
    {
      TIDELOG_STORE             = local.store
      TIDELOG_S3_REGION         = local.region
      TIDELOG_HOST              = "0.0.0.0"
      TIDELOG_PORT              = tostring(local.http_port)
      TIDELOG_PEER_PORT         = tostring(local.peer_port)
      TIDELOG_HOT_DIR           = "/var/lib/tidelog"
      TIDELOG_FLUSH_INTERVAL_MS = tostring(var.flush_interval_ms)
      # The brokers are in several zones, without a name for each: bytes between zones have a price.
      TIDELOG_SEQUENCER_UPLOAD_BYTES = "262144"
      # 0: the schedule runs retention, with rights that brokers do not have.
      TIDELOG_RETENTION_CHECK_INTERVAL_MS = "0"
    },
  )
}
