# A VPC with a gateway endpoint for S3, which costs nothing. Tasks also need ECR, the logs and the secrets of
# AWS. By default the subnets have a route to the internet, and each task a public address, which the security
# group allows no connection to. With has_private_endpoints the VPC has no way to the internet, but interface
# endpoints. If vpc_id is given, none of this is created.

data "aws_availability_zones" "available" {
  state = "available"
}

locals {
  has_own_vpc = var.vpc_id == ""
  zones       = local.has_own_vpc ? slice(data.aws_availability_zones.available.names, 0, 3) : []
  vpc_id      = local.has_own_vpc ? aws_vpc.own[0].id : var.vpc_id
  subnet_ids  = local.has_own_vpc ? aws_subnet.own[*].id : var.subnet_ids

  # Whether tasks reach AWS by a public address of their own.
  is_public     = local.has_own_vpc ? !var.has_private_endpoints : var.has_public_subnets
  has_internet  = local.has_own_vpc && !var.has_private_endpoints
  has_endpoints = local.has_own_vpc && var.has_private_endpoints
  services      = concat(["ecr.api", "ecr.dkr", "logs"], length(var.secret_settings) == 0 ? [] : ["secretsmanager"])
  endpoints     = toset(local.has_endpoints ? local.services : [])
}

resource "aws_vpc" "own" {
  count                = local.has_own_vpc ? 1 : 0
  cidr_block           = var.vpc_cidr
  enable_dns_support   = true
  enable_dns_hostnames = true
  tags                 = merge(local.tags, { Name = var.name })
}

resource "aws_default_security_group" "own" {
  count  = local.has_own_vpc ? 1 : 0
  vpc_id = aws_vpc.own[0].id
  tags   = local.tags
}

resource "aws_subnet" "own" {
  count             = length(local.zones)
  vpc_id            = aws_vpc.own[0].id
  availability_zone = local.zones[count.index]
  cidr_block        = cidrsubnet(var.vpc_cidr, 4, count.index)
  tags              = merge(local.tags, { Name = "${var.name}-${local.zones[count.index]}" })
}

resource "aws_route_table" "own" {
  count  = local.has_own_vpc ? 1 : 0
  vpc_id = aws_vpc.own[0].id
  tags   = merge(local.tags, { Name = var.name })
}

resource "aws_internet_gateway" "own" {
  count  = local.has_internet ? 1 : 0
  vpc_id = aws_vpc.own[0].id
  tags   = merge(local.tags, { Name = var.name })
}

resource "aws_route" "internet" {
  count                  = local.has_internet ? 1 : 0
  route_table_id         = aws_route_table.own[0].id
  destination_cidr_block = "0.0.0.0/0"
  gateway_id             = aws_internet_gateway.own[0].id
}

resource "aws_route_table_association" "own" {
  count          = length(local.zones)
  subnet_id      = aws_subnet.own[count.index].id
  route_table_id = aws_route_table.own[0].id
}

resource "aws_vpc_endpoint" "s3" {
  count             = local.has_own_vpc ? 1 : 0
  vpc_id            = aws_vpc.own[0].id
  service_name      = "com.amazonaws.${local.region}.s3"
  vpc_endpoint_type = "Gateway"
  route_table_ids   = [aws_route_table.own[0].id]
  tags              = merge(local.tags, { Name = "${var.name}-s3" })
}

resource "aws_security_group" "endpoints" {
  count       = local.has_endpoints ? 1 : 0
  name        = "${var.name}-endpoints"
  description = "AWS services, from within the VPC"
  vpc_id      = aws_vpc.own[0].id
  tags        = local.tags
}

resource "aws_vpc_security_group_ingress_rule" "endpoints" {
  count             = local.has_endpoints ? 1 : 0
  security_group_id = aws_security_group.endpoints[0].id
  description       = "HTTPS from the VPC"
  cidr_ipv4         = var.vpc_cidr
  ip_protocol       = "tcp"
  from_port         = 443
  to_port           = 443
}

resource "aws_vpc_endpoint" "interface" {
  for_each            = local.endpoints
  vpc_id              = aws_vpc.own[0].id
  service_name        = "com.amazonaws.${local.region}.${each.key}"
  vpc_endpoint_type   = "Interface"
  subnet_ids          = aws_subnet.own[*].id
  security_group_ids  = [aws_security_group.endpoints[0].id]
  private_dns_enabled = true
  tags                = merge(local.tags, { Name = "${var.name}-${each.key}" })
}

# -- security groups

resource "aws_security_group" "balancer" {
  name        = "${var.name}-balancer"
  description = "Clients of the log"
  vpc_id      = local.vpc_id
  tags        = local.tags
}

resource "aws_security_group" "brokers" {
  name        = "${var.name}-brokers"
  description = "Brokers and jobs"
  vpc_id      = local.vpc_id
  tags        = local.tags
}

resource "aws_vpc_security_group_ingress_rule" "clients" {
  for_each          = toset(var.client_cidrs)
  security_group_id = aws_security_group.balancer.id
  description       = "Clients"
  cidr_ipv4         = each.value
  ip_protocol       = "tcp"
  from_port         = local.listener_port
  to_port           = local.listener_port
}

resource "aws_vpc_security_group_egress_rule" "balancer" {
  security_group_id            = aws_security_group.balancer.id
  description                  = "Brokers"
  referenced_security_group_id = aws_security_group.brokers.id
  ip_protocol                  = "tcp"
  from_port                    = local.http_port
  to_port                      = local.http_port
}

resource "aws_vpc_security_group_ingress_rule" "brokers" {
  security_group_id            = aws_security_group.brokers.id
  description                  = "Requests from the balancer"
  referenced_security_group_id = aws_security_group.balancer.id
  ip_protocol                  = "tcp"
  from_port                    = local.http_port
  to_port                      = local.http_port
}

resource "aws_vpc_security_group_ingress_rule" "peers" {
  security_group_id            = aws_security_group.brokers.id
  description                  = "Between brokers"
  referenced_security_group_id = aws_security_group.brokers.id
  ip_protocol                  = "tcp"
  from_port                    = local.peer_port
  to_port                      = local.peer_port
}

resource "aws_vpc_security_group_egress_rule" "peers" {
  security_group_id            = aws_security_group.brokers.id
  description                  = "Between brokers"
  referenced_security_group_id = aws_security_group.brokers.id
  ip_protocol                  = "tcp"
  from_port                    = local.peer_port
  to_port                      = local.peer_port
}

resource "aws_vpc_security_group_egress_rule" "https" {
  security_group_id = aws_security_group.brokers.id
  description       = "S3, the registry, logs, secrets"
  cidr_ipv4         = "0.0.0.0/0"
  ip_protocol       = "tcp"
  from_port         = 443
  to_port           = 443
}
