# -- what it is called, and where the log lives

variable "name" {
  description = "Name of the cluster: of every resource, and of the bucket where `bucket_name` is empty."
  type        = string
  default     = "tidelog"

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{1,20}[a-z0-9]$", var.name))
    error_message = "The name has 3 to 22 lower-case letters, digits and hyphens: load balancers take 32 characters in all."
  }
}

variable "bucket_name" {
  description = "Name of the bucket. Empty: the name of the cluster, and the account's number."
  type        = string
  default     = ""

  validation {
    condition     = var.bucket_name == "" || can(regex("^[a-z0-9][a-z0-9-]{1,61}[a-z0-9]$", var.bucket_name))
    error_message = "A bucket's name has 3 to 63 lower-case letters, digits and hyphens (dots break TLS)."
  }
}

variable "prefix" {
  description = "Prefix of the cluster in the bucket: `s3://bucket/prefix` is the store."
  type        = string
  default     = "cluster"

  validation {
    condition     = can(regex("^[A-Za-z0-9][A-Za-z0-9_-]*$", var.prefix))
    error_message = "The prefix is one word of letters, digits, hyphens and underscores."
  }
}

variable "is_wal_write_once" {
  description = "Whether the bucket itself refuses to overwrite WAL entries. Off only while a backup is copied back."
  type        = bool
  default     = true
}

variable "is_protected" {
  description = "Whether a bucket that holds objects, and the balancer, are kept from being destroyed. Off where the log may go."
  type        = bool
  default     = true
}

variable "kms_key_arn" {
  description = "Key that encrypts the bucket. Empty: S3's own keys (SSE-S3), which cost nothing a request."
  type        = string
  default     = ""

  validation {
    condition     = var.kms_key_arn == "" || can(regex("^arn:[a-z-]+:kms:", var.kms_key_arn))
    error_message = "This is not the ARN of a KMS key."
  }
}

variable "tags" {
  description = "Tags of every resource."
  type        = map(string)
  default     = {}
}

# -- network

variable "vpc_id" {
  description = "VPC to run in. Empty: one of its own, with endpoints instead of a NAT gateway."
  type        = string
  default     = ""
}

variable "subnet_ids" {
  description = "Private subnets of `vpc_id` for brokers and the balancer, in two zones at least; with a way to S3 and ECR."
  type        = list(string)
  default     = []

  validation {
    condition     = length(var.subnet_ids) == 0 || length(var.subnet_ids) >= 2
    error_message = "A balancer takes subnets in two zones at least."
  }

  validation {
    condition     = (var.vpc_id == "") == (length(var.subnet_ids) == 0)
    error_message = "Give vpc_id and subnet_ids, or neither."
  }
}

variable "vpc_cidr" {
  description = "Addresses of the VPC that is made."
  type        = string
  default     = "10.42.0.0/16"

  validation {
    condition     = can(cidrsubnet(var.vpc_cidr, 4, 2))
    error_message = "This is no CIDR block with room for three subnets."
  }
}

variable "client_cidrs" {
  description = "Addresses from which clients reach the balancer."
  type        = list(string)

  validation {
    condition     = alltrue([for cidr in var.client_cidrs : can(cidrhost(cidr, 0))])
    error_message = "Each is a CIDR block, as 10.0.0.0/8."
  }

  validation {
    condition     = !contains(var.client_cidrs, "0.0.0.0/0")
    error_message = "The balancer is internal: name the networks of its clients."
  }
}

variable "certificate_arn" {
  description = "Certificate of the balancer. Empty: plain HTTP, for a network that encrypts by itself."
  type        = string
  default     = ""
}

# -- brokers

variable "image" {
  description = "Image of deploy/Dockerfile, in a registry that the tasks reach."
  type        = string
}

variable "broker_cpu" {
  description = "CPU units of a broker: 1024 is one core. A process uses about one and a half."
  type        = number
  default     = 2048

  validation {
    condition     = contains([512, 1024, 2048, 4096], var.broker_cpu)
    error_message = "Fargate has 512, 1024, 2048 or 4096 for one broker."
  }
}

variable "broker_memory" {
  description = "MiB of a broker: the caches and buffers of the settings, and 500."
  type        = number
  default     = 4096

  validation {
    condition     = var.broker_memory >= 2048 && var.broker_memory % 1024 == 0
    error_message = "With the default caches a broker takes 2048 at least, in steps of 1024."
  }
}

variable "brokers_min" {
  description = "Brokers at least."
  type        = number
  default     = 2

  validation {
    condition     = var.brokers_min >= 1
    error_message = "One broker at least."
  }
}

variable "brokers_max" {
  description = "Brokers at most; between the two the CPU decides."
  type        = number
  default     = 8

  validation {
    condition     = var.brokers_max >= var.brokers_min && var.brokers_max <= 40
    error_message = "At least brokers_min, and 40 at most: what one WAL was measured with."
  }
}

variable "settings" {
  description = "Settings of the brokers by variable, as `TIDELOG_FLUSH_BYTES`; those of the module win."
  type        = map(string)
  default     = {}

  validation {
    condition     = alltrue([for name in keys(var.settings) : can(regex("^TIDELOG_[A-Z0-9_]+$", name))])
    error_message = "Settings are variables, as TIDELOG_FLUSH_INTERVAL_MS."
  }
}

variable "secret_settings" {
  description = "Settings that nobody should read in the task definition: variable to ARN in Secrets Manager."
  type        = map(string)
  default     = {}

  validation {
    condition     = alltrue([for arn in values(var.secret_settings) : can(regex("^arn:[a-z-]+:secretsmanager:", arn))])
    error_message = "Each value is the ARN of a secret."
  }
}

variable "flush_interval_ms" {
  description = "Least time between two commits of a broker: 250 costs about $52 a month and broker in PUTs, under load."
  type        = number
  default     = 250

  validation {
    condition     = var.flush_interval_ms >= 0 && var.flush_interval_ms <= 60000
    error_message = "From 0 to 60000."
  }
}

# -- maintenance, Spark, alarms

variable "maintain_schedule" {
  description = "When retention, merging and collection run."
  type        = string
  default     = "rate(1 hour)"

  validation {
    condition     = can(regex("^(rate|cron)\\(.+\\)$", var.maintain_schedule))
    error_message = "rate(...) or cron(...), as EventBridge Scheduler has them."
  }
}

variable "has_spark" {
  description = "Whether there is an EMR Serverless application for compaction of large tables, and its schedule."
  type        = bool
  default     = false
}

variable "spark_image" {
  description = "Image for EMR Serverless: one of EMR's own, with tidelog and deploy/jobs installed."
  type        = string
  default     = ""

  validation {
    condition     = var.spark_image != "" || !var.has_spark
    error_message = "has_spark needs spark_image."
  }
}

variable "spark_entry_point" {
  description = "What spark-submit runs: a file in the image, or an object that the job may read."
  type        = string
  default     = "local:///opt/tidelog/jobs/spark_command.py"
}

variable "spark_schedule" {
  description = "When Spark compacts."
  type        = string
  default     = "cron(47 2 * * ? *)"

  validation {
    condition     = can(regex("^(rate|cron)\\(.+\\)$", var.spark_schedule))
    error_message = "rate(...) or cron(...), as EventBridge Scheduler has them."
  }
}

variable "alarm_topic_arns" {
  description = "SNS topics that alarms tell."
  type        = list(string)
  default     = []
}

variable "log_retention_days" {
  description = "Days that logs of brokers and jobs are kept."
  type        = number
  default     = 30

  validation {
    condition     = contains([1, 3, 5, 7, 14, 30, 60, 90, 120, 150, 180, 365, 400, 545, 731], var.log_retention_days)
    error_message = "CloudWatch knows 1, 3, 5, 7, 14, 30, 60, 90, 120, 150, 180, 365, 400, 545, 731."
  }
}
