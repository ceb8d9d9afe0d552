output "url" {
  description = "URL of the balancer, for clients."
  value       = "${local.has_tls ? "https" : "http"}://${aws_lb.brokers.dns_name}"
}

output "store" {
  description = "URL of the log in the bucket, for `--store`."
  value       = local.store
}

output "bucket_arn" {
  description = "ARN of the bucket."
  value       = aws_s3_bucket.log.arn
}

output "policy_arns" {
  description = "Policies by name (broker, maintain, reader), for roles outside of this module: IRSA, Spark clusters, analysts."
  value       = { for role, policy in aws_iam_policy.store : role => policy.arn }
}

output "role_arns" {
  description = "Roles of the tasks and jobs."
  value       = { for role, made in aws_iam_role.task : role => made.arn }
}

output "security_group_id" {
  description = "Security group of the brokers, for clients without the balancer and for scrapers of /metrics."
  value       = aws_security_group.brokers.id
}

output "balancer_zone_id" {
  description = "Hosted zone of the balancer, for an alias record."
  value       = aws_lb.brokers.zone_id
}

output "log_group" {
  description = "Log group of brokers and jobs."
  value       = aws_cloudwatch_log_group.log.name
}
