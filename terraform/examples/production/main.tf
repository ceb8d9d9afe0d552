# A cluster in an existing VPC, with TLS, a KMS key, Spark, and alarms that go to an SNS topic.

terraform {
  required_version = ">= 1.9"

  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = ">= 6.0, < 7.0"
    }
  }
}

provider "aws" {
  region = "eu-central-1"

  default_tags {
    tags = { team = "platform" }
  }
}

variable "image" {
  description = "Image of deploy/Dockerfile, by digest."
  type        = string
}

variable "spark_image" {
  description = "Image of deploy/Dockerfile with `--target spark`, by digest."
  type        = string
}

variable "vpc_id" {
  description = "Id of the VPC."
  type        = string
}

variable "subnet_ids" {
  description = "Private subnets in three zones, with an S3 gateway endpoint."
  type        = list(string)
}

variable "certificate_arn" {
  description = "Certificate for the host name that clients use."
  type        = string
}

variable "kms_key_arn" {
  description = "KMS key of the bucket."
  type        = string
}

resource "aws_sns_topic" "alarms" {
  name              = "tidelog-alarms"
  kms_master_key_id = "alias/aws/sns"
}

module "tidelog" {
  source = "../.."

  name            = "tidelog"
  bucket_name     = "example-tidelog"
  image           = var.image
  vpc_id          = var.vpc_id
  subnet_ids      = var.subnet_ids
  client_cidrs    = ["10.0.0.0/8"]
  certificate_arn = var.certificate_arn
  kms_key_arn     = var.kms_key_arn

  broker_cpu    = 4096
  broker_memory = 8192
  brokers_min   = 3
  brokers_max   = 12
  settings = {
    TIDELOG_BUFFER_BYTES_MAX = "1073741824"
    TIDELOG_READ_CACHE_BYTES = "1073741824"
    TIDELOG_TAIL_CACHE_BYTES = "1073741824"
  }

  has_spark          = true
  spark_image        = var.spark_image
  alarm_topic_arns   = [aws_sns_topic.alarms.arn]
  log_retention_days = 90
}

output "url" {
  description = "URL of the balancer, for clients."
  value       = module.tidelog.url
}

output "policy_arns" {
  description = "Policies for roles of analysts and jobs."
  value       = module.tidelog.policy_arns
}
