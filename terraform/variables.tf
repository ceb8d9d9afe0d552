# -- names and the bucket

variable "name" {
  description = "Name of the cluster. Names of resources begin with it."
  type        = string
  default     = "tidelog"

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{1,20}[a-z0-9]$", var.name))
    error_message = "The name must have 3 to 22 lower-case letters, digits and hyphens: a load balancer's name has at most 32."
  }
}

variable "bucket_name" {
  description = "Name of the bucket. Empty: the name of the cluster, a hyphen and the account id."
  type        = string
  default     = ""

  validation {
    condition     = var.bucket_name == "" || can(regex("^[a-z0-9][a-z0-9-]{1,61}[a-z0-9]$", var.bucket_name))
    error_message = "The bucket's name must have 3 to 63 lower-case letters, digits and hyphens (dots break TLS)."
  }
}

variable "prefix" {
  description = "Prefix of the cluster in the bucket: `s3://bucket/prefix` is the store."
  type        = string
  default     = "cluster"

  validation {
    condition     = can(regex("^[A-Za-z0-9][A-Za-z0-9_-]*$", var.prefix))
    error_message = "The prefix must be one word of letters, digits, hyphens and underscores."
  }
}

variable "is_wal_write_once" {
  description = "Whether the bucket policy denies overwriting WAL entries. Set it to false only while another tool than `tidelog restore` copies a backup into the bucket."
  type        = bool
  default     = true
}

variable "is_protected" {
  description = "Whether Terraform refuses to destroy the balancer and a bucket with objects. Set it to false for a trial."
  type        = bool
  default     = true
}

variable "kms_key_arn" {
  description = "ARN of the KMS key of the bucket. Empty: S3's own keys (SSE-S3), which cost nothing per request."
  type        = string
  default     = ""

  validation {
    condition     = var.kms_key_arn == "" || can(regex("^arn:[a-z-]+:kms:", var.kms_key_arn))
    error_message = "kms_key_arn must be the ARN of a KMS key."
  }
}

variable "tags" {
  description = "Tags of every resource."
  type        = map(string)
  default     = {}
}

# -- network

variable "vpc_id" {
  description = "VPC of the cluster. Empty: a new VPC in three zones, without a NAT gateway."
  type        = string
  default     = ""
}

variable "subnet_ids" {
  description = "Subnets of `vpc_id` for brokers and balancer, in at least two zones. They need a route to ECR and CloudWatch (a NAT gateway, endpoints, or `has_public_subnets`), and a gateway endpoint for S3."
  type        = list(string)
  default     = []

  validation {
    condition     = length(var.subnet_ids) == 0 || length(var.subnet_ids) >= 2
    error_message = "A balancer needs subnets in at least two zones."
  }

  validation {
    condition     = (var.vpc_id == "") == (length(var.subnet_ids) == 0)
    error_message = "Give vpc_id and subnet_ids, or neither."
  }
}

variable "has_public_subnets" {
  description = "Whether `subnet_ids` have a route to an internet gateway, as those of a default VPC. Then each task gets a public address, to which the security group allows no connection."
  type        = bool
  default     = false

  validation {
    condition     = !var.has_public_subnets || var.vpc_id != ""
    error_message = "has_public_subnets is about subnet_ids: for a new VPC, set has_private_endpoints."
  }
}

variable "has_private_endpoints" {
  description = "Whether the new VPC has interface endpoints (ECR, logs, and Secrets Manager if there are `secret_settings`) and no way to the internet: $66 to $88 a month. False: tasks reach these services by a public address, to which the security group allows no connection: $3.65 a month for each task."
  type        = bool
  default     = false

  validation {
    condition     = !var.has_private_endpoints || var.vpc_id == ""
    error_message = "has_private_endpoints is about a new VPC: create the endpoints of vpc_id where you create vpc_id."
  }
}

variable "vpc_cidr" {
  description = "Addresses of the new VPC, if `vpc_id` is empty."
  type        = string
  default     = "10.42.0.0/16"

  validation {
    condition     = can(cidrsubnet(var.vpc_cidr, 4, 2))
    error_message = "vpc_cidr must be a CIDR block with room for three subnets."
  }
}

variable "client_cidrs" {
  description = "Addresses from which clients reach the balancer."
  type        = list(string)

  validation {
    condition     = alltrue([for cidr in var.client_cidrs : can(cidrhost(cidr, 0))])
    error_message = "Each element must be a CIDR block, such as 10.0.0.0/8."
  }

  validation {
    condition     = !contains(var.client_cidrs, "0.0.0.0/0")
    error_message = "The balancer is internal: name the networks of its clients."
  }
}

variable "certificate_arn" {
  description = "ARN of the balancer's certificate. Empty: plain HTTP, for a network with its own encryption."
  type        = string
  default     = ""
}

# -- brokers

variable "image" {
  description = "Image built from deploy/Dockerfile, in a registry that the tasks can reach."
  type        = string
}

variable "broker_cpu" {
  description = "CPU units of a broker; 1024 is one vCPU. A broker uses at most one and a half; 512 is enough for a small cluster."
  type        = number
  default     = 512

  validation {
    condition     = contains([512, 1024, 2048, 4096], var.broker_cpu)
    error_message = "broker_cpu must be 512, 1024, 2048 or 4096 (Fargate)."
  }
}

locals {
  # The caches and buffers of a broker in bytes, with the defaults of service/docs/SETTINGS.md.
  broker_buffers = {
    TIDELOG_BUFFER_BYTES_MAX      = 268435456
    TIDELOG_FETCH_BYTES_IN_FLIGHT = 268435456
    TIDELOG_TAIL_CACHE_BYTES      = 268435456
    TIDELOG_READ_CACHE_BYTES      = 436207616
  }
  broker_memory_min = 500 + ceil(sum([
    for name, bytes in local.broker_buffers : tonumber(lookup(var.settings, name, tostring(bytes)))
  ]) / 1048576)
}

variable "broker_memory" {
  description = "Memory of a broker in MiB: at least the sum of its caches and buffers, and 500. The default is for the default caches; with smaller ones in `settings`, 1024 is enough."
  type        = number
  default     = 2048

  validation {
    condition     = var.broker_memory >= local.broker_memory_min
    error_message = "broker_memory must be at least ${local.broker_memory_min}, for the caches and buffers in `settings`: lower them, or raise it."
  }

  validation {
    condition     = var.broker_memory % 1024 == 0 && var.broker_memory >= 2 * var.broker_cpu && var.broker_memory <= min(8 * var.broker_cpu, 30720)
    error_message = "broker_memory must be a multiple of 1024, and 2 to 8 times broker_cpu, at most 30720 (Fargate)."
  }
}

variable "brokers_min" {
  description = "Minimum number of brokers."
  type        = number
  default     = 2

  validation {
    condition     = var.brokers_min >= 1
    error_message = "brokers_min must be at least 1."
  }
}

variable "brokers_max" {
  description = "Maximum number of brokers. The scaling between minimum and maximum follows the CPU load."
  type        = number
  default     = 8

  validation {
    condition     = var.brokers_max >= var.brokers_min && var.brokers_max <= 40
    error_message = "brokers_max must be at least brokers_min and at most 40, the largest measured cluster."
  }
}

variable "settings" {
  description = "Settings of the brokers by variable, such as `TIDELOG_FLUSH_BYTES`. The module's own settings override them, except `TIDELOG_ALLOWED_HOSTS`."
  type        = map(string)
  default     = {}

  validation {
    condition     = alltrue([for name in keys(var.settings) : can(regex("^TIDELOG_[A-Z0-9_]+$", name))])
    error_message = "Each key must be the variable of a setting, such as TIDELOG_FLUSH_INTERVAL_MS."
  }
}

variable "secret_settings" {
  description = "Settings whose values must not be in the task definition: ARN in Secrets Manager, by variable."
  type        = map(string)
  default     = {}

  validation {
    condition     = alltrue([for arn in values(var.secret_settings) : can(regex("^arn:[a-z-]+:secretsmanager:", arn))])
    error_message = "Each value must be the ARN of a secret."
  }
}

variable "flush_interval_ms" {
  description = "Constant minimum time between two commits of the cluster. With 250, their PUTs cost about $52 a month under load. With 0, the budget of the setting commits_per_minute decides, which costs $26 at most."
  type        = number
  default     = 0

  validation {
    condition     = var.flush_interval_ms >= 0 && var.flush_interval_ms <= 60000
    error_message = "flush_interval_ms must be from 0 to 60000."
  }
}

# -- maintenance, Spark, alarms

variable "maintain_schedule" {
  description = "Schedule of retention, merging, compaction and collection."
  type        = string
  default     = "rate(1 hour)"

  validation {
    condition     = can(regex("^(rate|cron)\\(.+\\)$", var.maintain_schedule))
    error_message = "The schedule must be rate(...) or cron(...), as in EventBridge Scheduler."
  }
}

variable "has_spark" {
  description = "Whether to schedule a task with Spark for the compaction of large tables."
  type        = bool
  default     = false
}

variable "spark_image" {
  description = "Image built from deploy/Dockerfile with `--target spark`."
  type        = string
  default     = ""

  validation {
    condition     = var.spark_image != "" || !var.has_spark
    error_message = "has_spark needs spark_image."
  }
}

variable "spark_cpu" {
  description = "CPU units of the task with Spark; 1024 is one core."
  type        = number
  default     = 8192
}

variable "spark_memory" {
  description = "Memory of the task with Spark in MiB; Java gets 70 % of it."
  type        = number
  default     = 32768
}

variable "spark_schedule" {
  description = "Schedule of the compaction with Spark."
  type        = string
  default     = "cron(47 2 * * ? *)"

  validation {
    condition     = can(regex("^(rate|cron)\\(.+\\)$", var.spark_schedule))
    error_message = "The schedule must be rate(...) or cron(...), as in EventBridge Scheduler."
  }
}

variable "alarm_topic_arns" {
  description = "SNS topics that receive the alarms."
  type        = list(string)
  default     = []
}

variable "has_container_insights" {
  description = "Whether ECS sends metrics of each task to CloudWatch, at $0.30 a month for each metric. The alarms do not need them."
  type        = bool
  default     = false
}

variable "log_retention_days" {
  description = "Retention of the logs of brokers and jobs, in days."
  type        = number
  default     = 30

  validation {
    condition     = contains([1, 3, 5, 7, 14, 30, 60, 90, 120, 150, 180, 365, 400, 545, 731], var.log_retention_days)
    error_message = "log_retention_days must be a value of CloudWatch: 1, 3, 5, 7, 14, 30, 60, 90, 120, 150, 180, 365, 400, 545, 731."
  }
}
