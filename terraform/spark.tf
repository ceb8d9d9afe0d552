# Compaction of tables that are too large for the task of maintenance: a larger task, in which Spark runs on
# all cores. Its image is that of deploy/Dockerfile with `--target spark`, so Spark has the version that
# tidelog is tested with; EMR 7 has Spark 3.5.

resource "aws_ecs_task_definition" "spark" {
  count                    = var.has_spark ? 1 : 0
  family                   = "${var.name}-spark"
  requires_compatibilities = ["FARGATE"]
  network_mode             = "awsvpc"
  cpu                      = var.spark_cpu
  memory                   = var.spark_memory
  execution_role_arn       = aws_iam_role.execution.arn
  task_role_arn            = aws_iam_role.task["maintain"].arn
  tags                     = local.tags

  ephemeral_storage {
    size_in_gib = 100
  }

  volume {
    name = "hot"
  }

  volume {
    name = "tmp"
  }

  container_definitions = jsonencode([merge(local.container, {
    name       = "spark"
    image      = var.spark_image
    entryPoint = ["/opt/tidelog/jobs/spark-compact.sh"]
    command    = []
    environment = concat(local.container.environment, [
      { name = "SPARK_MASTER", value = "local[*]" },
      { name = "SPARK_OPTIONS", value = "--conf spark.driver.memory=${floor(var.spark_memory * 0.7)}m" },
    ])
    logConfiguration = local.log_configuration["spark"]
  })])
}

resource "aws_scheduler_schedule" "spark" {
  count               = var.has_spark ? 1 : 0
  name                = "${var.name}-spark"
  schedule_expression = var.spark_schedule

  flexible_time_window {
    mode                      = "FLEXIBLE"
    maximum_window_in_minutes = 30
  }

  target {
    arn      = aws_ecs_cluster.log.arn
    role_arn = aws_iam_role.scheduler.arn

    ecs_parameters {
      task_definition_arn = aws_ecs_task_definition.spark[0].arn
      launch_type         = "FARGATE"

      network_configuration {
        subnets          = local.subnet_ids
        security_groups  = [aws_security_group.brokers.id]
        assign_public_ip = local.is_public
      }
    }

    retry_policy {
      maximum_retry_attempts       = 3
      maximum_event_age_in_seconds = 3600
    }

    dead_letter_config {
      arn = aws_sqs_queue.missed.arn
    }
  }
}
