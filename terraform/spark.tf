# Compaction of tables that are too large for one task: an EMR Serverless application, which costs nothing
# while no job runs, and a schedule. The image has the job's program and tidelog.

resource "aws_emrserverless_application" "spark" {
  count         = var.has_spark ? 1 : 0
  name          = var.name
  type          = "spark"
  release_label = "emr-7.9.0"
  architecture  = "X86_64"
  tags          = local.tags

  image_configuration {
    image_uri = var.spark_image
  }

  maximum_capacity {
    cpu    = "64 vCPU"
    memory = "256 GB"
  }

  network_configuration {
    subnet_ids         = local.subnet_ids
    security_group_ids = [aws_security_group.brokers.id]
  }

  auto_start_configuration {
    enabled = true
  }

  auto_stop_configuration {
    enabled              = true
    idle_timeout_minutes = 5
  }
}

data "aws_iam_policy_document" "spark_scheduler" {
  count = var.has_spark ? 1 : 0

  statement {
    actions   = ["emr-serverless:StartJobRun"]
    resources = [aws_emrserverless_application.spark[0].arn]
  }

  statement {
    actions   = ["iam:PassRole"]
    resources = [aws_iam_role.task["spark"].arn]

    condition {
      test     = "StringEquals"
      variable = "iam:PassedToService"
      values   = ["emr-serverless.amazonaws.com"]
    }
  }
}

resource "aws_iam_role_policy" "spark_scheduler" {
  count  = var.has_spark ? 1 : 0
  name   = "spark"
  role   = aws_iam_role.scheduler.name
  policy = data.aws_iam_policy_document.spark_scheduler[0].json
}

# The job's role also writes the job's log to CloudWatch.
data "aws_iam_policy_document" "spark_log" {
  count = var.has_spark ? 1 : 0

  statement {
    actions   = ["logs:DescribeLogGroups"]
    resources = ["*"]
  }

  statement {
    actions   = ["logs:CreateLogStream", "logs:DescribeLogStreams", "logs:PutLogEvents"]
    resources = ["${aws_cloudwatch_log_group.log.arn}:*"]
  }
}

resource "aws_iam_role_policy" "spark_log" {
  count  = var.has_spark ? 1 : 0
  name   = "log"
  role   = aws_iam_role.task["spark"].name
  policy = data.aws_iam_policy_document.spark_log[0].json
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
    arn      = "arn:${data.aws_partition.current.partition}:scheduler:::aws-sdk:emrserverless:startJobRun"
    role_arn = aws_iam_role.scheduler.arn

    input = jsonencode({
      ApplicationId           = aws_emrserverless_application.spark[0].id
      ExecutionRoleArn        = aws_iam_role.task["spark"].arn
      ClientToken             = "<aws.scheduler.execution-id>"
      Name                    = "compact"
      ExecutionTimeoutMinutes = 360
      JobDriver = {
        SparkSubmit = {
          EntryPoint          = var.spark_entry_point
          EntryPointArguments = ["compact", "--engine", "spark", "--yes", "--store", local.store]
          SparkSubmitParameters = join(" ", [
            "--conf spark.executor.cores=4",
            "--conf spark.executor.memory=12g",
            "--conf spark.emr-serverless.driverEnv.TIDELOG_S3_REGION=${local.region}",
            "--conf spark.executorEnv.TIDELOG_S3_REGION=${local.region}",
          ])
        }
      }
      ConfigurationOverrides = {
        MonitoringConfiguration = {
          CloudWatchLoggingConfiguration = {
            Enabled             = true
            LogGroupName        = aws_cloudwatch_log_group.log.name
            LogStreamNamePrefix = "spark"
          }
        }
      }
    })

    dead_letter_config {
      arn = aws_sqs_queue.missed.arn
    }
  }
}
