# Brokers on Fargate. They have no durable state, so the service may start and stop them at any time.

resource "aws_ecs_cluster" "log" {
  name = var.name
  tags = local.tags

  setting {
    name  = "containerInsights"
    value = var.has_container_insights ? "enabled" : "disabled"
  }
}

resource "aws_cloudwatch_log_group" "log" {
  name              = "/tidelog/${var.name}"
  retention_in_days = var.log_retention_days
  tags              = local.tags
}

locals {
  log_configuration = {
    for job in ["broker", "maintain", "spark"] : job => {
      logDriver = "awslogs"
      options = {
        "awslogs-group"         = aws_cloudwatch_log_group.log.name
        "awslogs-region"        = local.region
        "awslogs-stream-prefix" = job
      }
    }
  }
  container = {
    image                  = var.image
    essential              = true
    readonlyRootFilesystem = true
    environment            = [for name, value in local.environment : { name = name, value = value }]
    secrets                = [for name, arn in var.secret_settings : { name = name, valueFrom = arn }]
    mountPoints = [
      { sourceVolume = "hot", containerPath = "/var/lib/tidelog", readOnly = false },
      { sourceVolume = "tmp", containerPath = "/tmp", readOnly = false },
    ]
  }
}

resource "aws_ecs_task_definition" "broker" {
  family                   = "${var.name}-broker"
  requires_compatibilities = ["FARGATE"]
  network_mode             = "awsvpc"
  cpu                      = var.broker_cpu
  memory                   = var.broker_memory
  execution_role_arn       = aws_iam_role.execution.arn
  task_role_arn            = aws_iam_role.task["broker"].arn
  tags                     = local.tags

  # Both volumes end with the task: records of acks=1 survive a crash of the process, not the end of the task.
  volume {
    name = "hot"
  }

  volume {
    name = "tmp"
  }

  container_definitions = jsonencode([merge(local.container, {
    name             = "broker"
    command          = ["serve"]
    logConfiguration = local.log_configuration["broker"]
    # A broker needs at most 27 s to stop: 5 s of drain (drain_ms), 10 s for open requests, 12 s for the last flush.
    stopTimeout = 45
    portMappings = [
      { containerPort = local.http_port, protocol = "tcp" },
      { containerPort = local.peer_port, protocol = "tcp" },
    ]
    ulimits = [{ name = "nofile", softLimit = 65536, hardLimit = 65536 }]
    healthCheck = {
      command = [
        "CMD", "python", "-c",
        "import urllib.request as r; r.urlopen('http://127.0.0.1:${local.http_port}/healthy', timeout=4)",
      ]
      interval    = 10
      timeout     = 5
      retries     = 3
      startPeriod = 60
    }
  })])
}

resource "aws_ecs_service" "brokers" {
  name                               = "brokers"
  cluster                            = aws_ecs_cluster.log.id
  task_definition                    = aws_ecs_task_definition.broker.arn
  launch_type                        = "FARGATE"
  desired_count                      = var.brokers_min
  deployment_minimum_healthy_percent = 100
  deployment_maximum_percent         = 200
  health_check_grace_period_seconds  = 60
  propagate_tags                     = "SERVICE"
  tags                               = local.tags

  network_configuration {
    subnets          = local.subnet_ids
    security_groups  = [aws_security_group.brokers.id]
    assign_public_ip = local.is_public
  }

  load_balancer {
    target_group_arn = aws_lb_target_group.brokers.arn
    container_name   = "broker"
    container_port   = local.http_port
  }

  deployment_circuit_breaker {
    enable   = true
    rollback = true
  }

  lifecycle {
    ignore_changes = [desired_count] # the scaling below sets it
  }

  # Without the route or the endpoints, the first tasks could not pull their image.
  depends_on = [
    aws_lb_listener.brokers,
    aws_iam_role_policy_attachment.store,
    aws_route.internet,
    aws_vpc_endpoint.interface,
  ]
}

resource "aws_appautoscaling_target" "brokers" {
  service_namespace  = "ecs"
  resource_id        = "service/${aws_ecs_cluster.log.name}/${aws_ecs_service.brokers.name}"
  scalable_dimension = "ecs:service:DesiredCount"
  min_capacity       = var.brokers_min
  max_capacity       = var.brokers_max
}

resource "aws_appautoscaling_policy" "brokers" {
  name               = "${var.name}-cpu"
  policy_type        = "TargetTrackingScaling"
  service_namespace  = aws_appautoscaling_target.brokers.service_namespace
  resource_id        = aws_appautoscaling_target.brokers.resource_id
  scalable_dimension = aws_appautoscaling_target.brokers.scalable_dimension

  target_tracking_scaling_policy_configuration {
    target_value       = 60
    scale_out_cooldown = 60
    scale_in_cooldown  = 600 # slow, because the caches of a stopped broker are lost

    predefined_metric_specification {
      predefined_metric_type = "ECSServiceAverageCPUUtilization"
    }
  }
}
