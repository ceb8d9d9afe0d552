# A trial: two brokers in a new VPC. `terraform destroy` deletes all of it, with the log.

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
}

variable "image" {
  description = "Image of deploy/Dockerfile."
  type        = string
}

module "tidelog" {
  source = "../.."

  name         = "tidelog-trial"
  image        = var.image
  client_cidrs = ["10.42.0.0/16"]
  is_protected = false
}

output "url" {
  description = "URL of the balancer, for clients in the VPC."
  value       = module.tidelog.url
}
