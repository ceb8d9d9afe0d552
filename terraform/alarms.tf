# Alarms on AWS's own metrics. The metrics of brokers are in /metrics; their alerts are in
# deploy/monitoring/alerts.yml.

locals {
  balancer = {
    LoadBalancer = aws_lb.brokers.arn_suffix
    TargetGroup  = aws_lb_target_group.brokers.arn_suffix
  }
  service = { ClusterName = aws_ecs_cluster.log.name, ServiceName = aws_ecs_service.brokers.name }
  requests = {
    BucketName = aws_s3_bucket.log.id
    FilterId   = aws_s3_bucket_metric.log.name
  }
  queue = { QueueName = aws_sqs_queue.missed.name }

  alarms = {
    no-broker = {
      about      = "No broker answers /ready: clients can neither produce nor consume."
      namespace  = "AWS/ApplicationELB", metric = "HealthyHostCount", dimensions = local.balancer
      comparison = "LessThanThreshold", threshold = 1, statistic = "Minimum", missing = "breaching"
    }
    errors = {
      about      = "Brokers answer 5xx: the store fails, or a limit is reached."
      namespace  = "AWS/ApplicationELB", metric = "HTTPCode_Target_5XX_Count", dimensions = local.balancer
      comparison = "GreaterThanThreshold", threshold = 50, statistic = "Sum", missing = "notBreaching"
    }
    connections = {
      about      = "The balancer cannot connect to brokers."
      namespace  = "AWS/ApplicationELB", metric = "TargetConnectionErrorCount", dimensions = local.balancer
      comparison = "GreaterThanThreshold", threshold = 50, statistic = "Sum", missing = "notBreaching"
    }
    memory = {
      about      = "Brokers are near their memory limit: lower the caches, or raise broker_memory."
      namespace  = "AWS/ECS", metric = "MemoryUtilization", dimensions = local.service
      comparison = "GreaterThanThreshold", threshold = 90, statistic = "Maximum", missing = "notBreaching"
    }
    cpu = {
      about      = "Brokers are near their CPU limit: raise brokers_max, or broker_cpu."
      namespace  = "AWS/ECS", metric = "CPUUtilization", dimensions = local.service
      comparison = "GreaterThanThreshold", threshold = 85, statistic = "Average", missing = "notBreaching"
    }
    store = {
      about      = "S3 answers 5xx: acks are late."
      namespace  = "AWS/S3", metric = "5xxErrors", dimensions = local.requests
      comparison = "GreaterThanThreshold", threshold = 50, statistic = "Sum", missing = "notBreaching"
    }
    missed = {
      about      = "EventBridge could not start maintenance or Spark."
      namespace  = "AWS/SQS", metric = "ApproximateNumberOfMessagesVisible", dimensions = local.queue
      comparison = "GreaterThanThreshold", threshold = 0, statistic = "Maximum", missing = "notBreaching"
    }
    maintain = {
      about      = "Maintenance or Spark ended with an error: see its log."
      namespace  = "AWS/Events", metric = "MatchedEvents", dimensions = { RuleName = aws_cloudwatch_event_rule.failed.name }
      comparison = "GreaterThanThreshold", threshold = 0, statistic = "Sum", missing = "notBreaching"
    }
  }
}

# The rule has no target: the alarm counts its matches.
resource "aws_cloudwatch_event_rule" "failed" {
  name        = "${var.name}-maintain-failed"
  description = "Tasks of maintenance and Spark that ended with an error"
  tags        = local.tags

  event_pattern = jsonencode({
    source      = ["aws.ecs"]
    detail-type = ["ECS Task State Change"]
    detail = {
      clusterArn = [aws_ecs_cluster.log.arn]
      group      = ["family:${var.name}-maintain", "family:${var.name}-spark"]
      lastStatus = ["STOPPED"]
      containers = { exitCode = [{ anything-but = 0 }] }
    }
  })
}

resource "aws_cloudwatch_metric_alarm" "log" {
  for_each            = local.alarms
  alarm_name          = "${var.name}-${each.key}"
  alarm_description   = each.value.about
  namespace           = each.value.namespace
  metric_name         = each.value.metric
  dimensions          = each.value.dimensions
  comparison_operator = each.value.comparison
  threshold           = each.value.threshold
  statistic           = each.value.statistic
  treat_missing_data  = each.value.missing
  period              = 60
  evaluation_periods  = 5
  datapoints_to_alarm = contains(["missed", "maintain"], each.key) ? 1 : 3
  alarm_actions       = var.alarm_topic_arns
  ok_actions          = var.alarm_topic_arns
  tags                = local.tags
}
