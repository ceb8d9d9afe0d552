# Rights on the prefix: brokers create and read, maintenance also deletes, readers read. Only brokers can
# read brokers/* and secret.json: a process that has the tokens and the key in them can act as a broker.
# The statements are in policies/*.json.tftpl; a test compares them with the calls that it records of a
# broker and of maintenance. A condition on s3:prefix must allow requests that have no prefix (IfExists):
# if a key does not exist, S3 checks ListBucket, and without the right answers 403 instead of 404.

locals {
  policy_words = { bucket_arn = aws_s3_bucket.log.arn, prefix = var.prefix }
  policies = {
    for role in ["broker", "maintain", "reader"] :
    role => templatefile("${path.module}/policies/${role}.json.tftpl", local.policy_words)
  }
  # Tasks and jobs that run with these rights, and the AWS service that assumes the role.
  roles = { broker = "ecs-tasks.amazonaws.com", maintain = "ecs-tasks.amazonaws.com" }
}

data "aws_iam_policy_document" "assume" {
  for_each = local.roles

  statement {
    actions = ["sts:AssumeRole"]

    principals {
      type        = "Service"
      identifiers = [each.value]
    }

    condition {
      test     = "StringEquals"
      variable = "aws:SourceAccount"
      values   = [local.account]
    }
  }
}

resource "aws_iam_role" "task" {
  for_each           = local.roles
  name               = "${var.name}-${each.key}"
  assume_role_policy = data.aws_iam_policy_document.assume[each.key].json
  tags               = local.tags
}

resource "aws_iam_policy" "store" {
  for_each    = local.policies
  name        = "${var.name}-${each.key}"
  description = "What ${each.key} of tidelog cluster ${var.name} does in ${local.store}"
  policy      = each.value
  tags        = local.tags
}

resource "aws_iam_role_policy_attachment" "store" {
  for_each   = local.roles
  role       = aws_iam_role.task[each.key].name
  policy_arn = aws_iam_policy.store[each.key].arn
}

data "aws_iam_policy_document" "key" {
  count = var.kms_key_arn == "" ? 0 : 1

  statement {
    actions   = ["kms:Decrypt", "kms:GenerateDataKey"]
    resources = [var.kms_key_arn]
  }
}

resource "aws_iam_role_policy" "key" {
  for_each = var.kms_key_arn == "" ? {} : local.roles
  name     = "key"
  role     = aws_iam_role.task[each.key].name
  policy   = data.aws_iam_policy_document.key[0].json
}

# -- the role that starts tasks: it pulls the image, writes the log, reads the secrets

data "aws_iam_policy_document" "execution_assume" {
  statement {
    actions = ["sts:AssumeRole"]

    principals {
      type        = "Service"
      identifiers = ["ecs-tasks.amazonaws.com"]
    }
  }
}

resource "aws_iam_role" "execution" {
  name               = "${var.name}-execution"
  assume_role_policy = data.aws_iam_policy_document.execution_assume.json
  tags               = local.tags
}

resource "aws_iam_role_policy_attachment" "execution" {
  role       = aws_iam_role.execution.name
  policy_arn = "arn:${data.aws_partition.current.partition}:iam::aws:policy/service-role/AmazonECSTaskExecutionRolePolicy"
}

data "aws_iam_policy_document" "secrets" {
  count = length(var.secret_settings) == 0 ? 0 : 1

  statement {
    actions   = ["secretsmanager:GetSecretValue"]
    resources = distinct(values(var.secret_settings))
  }
}

resource "aws_iam_role_policy" "secrets" {
  count  = length(var.secret_settings) == 0 ? 0 : 1
  name   = "secrets"
  role   = aws_iam_role.execution.name
  policy = data.aws_iam_policy_document.secrets[0].json
}
