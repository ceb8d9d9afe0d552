# An internal balancer. It forwards streams without buffering; its timeout is above the longest long poll.

locals {
  has_tls       = var.certificate_arn != ""
  listener_port = local.has_tls ? 443 : 80
}

resource "aws_lb" "brokers" {
  name                       = var.name
  internal                   = true
  load_balancer_type         = "application"
  security_groups            = [aws_security_group.balancer.id]
  subnets                    = local.subnet_ids
  idle_timeout               = 120 # brokers keep idle connections longer, 130 s
  drop_invalid_header_fields = true
  enable_deletion_protection = var.is_protected
  tags                       = local.tags
}

resource "aws_lb_target_group" "brokers" {
  name        = var.name
  port        = local.http_port
  protocol    = "HTTP"
  target_type = "ip"
  vpc_id      = local.vpc_id
  # ECS sends SIGTERM after this delay; then the broker serves all requests for drain_ms by itself.
  deregistration_delay          = 10
  load_balancing_algorithm_type = "least_outstanding_requests"
  tags                          = local.tags

  health_check {
    path                = "/ready"
    matcher             = "200"
    interval            = 5
    timeout             = 3
    healthy_threshold   = 2
    unhealthy_threshold = 2
  }
}

resource "aws_lb_listener" "brokers" {
  load_balancer_arn = aws_lb.brokers.arn
  port              = local.listener_port
  protocol          = local.has_tls ? "HTTPS" : "HTTP"
  certificate_arn   = local.has_tls ? var.certificate_arn : null
  ssl_policy        = local.has_tls ? "ELBSecurityPolicy-TLS13-1-2-2021-06" : null
  tags              = local.tags

  default_action {
    type             = "forward"
    target_group_arn = aws_lb_target_group.brokers.arn
  }
}
