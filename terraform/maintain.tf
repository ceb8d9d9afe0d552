# A schedule for `tidelog maintain`: retention, merging, compaction and collection. A run may be killed at
# any moment; two runs at once are safe.

resource "aws_ecs_task_definition" "maintain" {
  family                   = "${var.name}-maintain"
  requires_compatibilities = ["FARGATE"]
  network_mode             = "awsvpc"
  cpu                      = 1024
  memory                   = 4096
  execution_role_arn       = aws_iam_role.execution.arn
  task_role_arn            = aws_iam_role.task["maintain"].arn
  tags                     = local.tags

  volume {
    name = "hot"
  }

  volume {
    name = "tmp"
  }

  container_definitions = jsonencode([merge(local.container, {
    name             = "maintain"
    command          = ["maintain", "--yes"]
    logConfiguration = local.log_configuration["maintain"]
  })])
}

data "aws_iam_policy_document" "scheduler_assume" {
  statement {
    actions = ["sts:AssumeRole"]

    principals {
      type        = "Service"
      identifiers = ["scheduler.amazonaws.com"]
    }

    condition {
      test     = "StringEquals"
      variable = "aws:SourceAccount"
      values   = [local.account]
    }
  }
}

locals {
  scheduled_tasks = concat(
    [aws_ecs_task_definition.maintain.arn_without_revision],
    aws_ecs_task_definition.spark[*].arn_without_revision,
  )
}

data "aws_iam_policy_document" "scheduler" {
  statement {
    actions   = ["ecs:RunTask"]
    resources = flatten([for task in local.scheduled_tasks : [task, "${task}:*"]])

    condition {
      test     = "ArnEquals"
      variable = "ecs:cluster"
      values   = [aws_ecs_cluster.log.arn]
    }
  }

  statement {
    actions   = ["iam:PassRole"]
    resources = [aws_iam_role.execution.arn, aws_iam_role.task["maintain"].arn]

    condition {
      test     = "StringEquals"
      variable = "iam:PassedToService"
      values   = ["ecs-tasks.amazonaws.com"]
    }
  }
}

resource "aws_iam_role" "scheduler" {
  name               = "${var.name}-scheduler"
  assume_role_policy = data.aws_iam_policy_document.scheduler_assume.json
  tags               = local.tags
}

resource "aws_iam_role_policy" "scheduler" {
  name   = "run"
  role   = aws_iam_role.scheduler.name
  policy = data.aws_iam_policy_document.scheduler.json
}

resource "aws_sqs_queue" "missed" {
  name                    = "${var.name}-missed"
  sqs_managed_sse_enabled = true
  tags                    = local.tags
}

data "aws_iam_policy_document" "missed" {
  statement {
    actions   = ["sqs:SendMessage"]
    resources = [aws_sqs_queue.missed.arn]
  }
}

resource "aws_iam_role_policy" "missed" {
  name   = "missed"
  role   = aws_iam_role.scheduler.name
  policy = data.aws_iam_policy_document.missed.json
}

resource "aws_scheduler_schedule" "maintain" {
  name                = "${var.name}-maintain"
  schedule_expression = var.maintain_schedule

  flexible_time_window {
    mode                      = "FLEXIBLE"
    maximum_window_in_minutes = 15
  }

  target {
    arn      = aws_ecs_cluster.log.arn
    role_arn = aws_iam_role.scheduler.arn

    ecs_parameters {
      task_definition_arn = aws_ecs_task_definition.maintain.arn
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

    # Runs that EventBridge could not start; an alarm counts them.
    dead_letter_config {
      arn = aws_sqs_queue.missed.arn
    }
  }
}
