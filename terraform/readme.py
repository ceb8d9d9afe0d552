"""Writes terraform/README.md from the .tf files: variables, outputs and resources.

    python -m terraform.readme > terraform/README.md

A test compares the file with the output.
"""

import sys

from terraform import hcl

PAGE_HEAD = """\
# terraform

A tidelog cluster on AWS. `python -m terraform.readme` writes this page from the .tf files: edit
those.

```
{minimal}
```

[examples/production](examples/production/main.tf) has an existing VPC, TLS, a KMS key, Spark and
alarms.

- **Bucket**: private, encrypted, TLS only. The bucket policy denies overwriting a WAL entry. No
  rule expires or moves an object, because only the log can prove that an object is garbage.
  Versioning is off: `storage.tf` has the reasons.
- **Rights**: brokers create and read, and delete only their liveness and probe objects.
  Maintenance also deletes garbage. Readers read. A test compares the policies in `policies/` with
  the calls that it records of a broker and of maintenance: each call is allowed, and each allowed
  action is called.
- **Trust**: a role that may write `wal/` or `checkpoints/` is an administrator of the cluster: it
  can commit any change, keys and ACLs too. Only the policies `broker` and `maintain` allow this:
  attach them to no other role. A role that can read `secret.json` and `brokers/` can act as a
  broker; `reader` cannot.
- **Network**: a new VPC with a gateway endpoint for S3 (free), or an existing VPC. Tasks also need
  ECR for their image, CloudWatch for their logs, and Secrets Manager for `secret_settings`. By
  default they reach these by a public address, and no security group lets a connection from
  outside in. `has_private_endpoints = true`: no public address and no route to the internet, but
  interface endpoints. In an existing VPC, a NAT gateway also does.
- **Brokers**: Fargate behind an internal balancer, scaled by CPU load. A task has 45 s to stop.
  The default size, 0.5 vCPU and 2 GB, is for a small cluster: a broker's default caches and
  buffers need 1.7 GB.
- **Maintenance**: EventBridge runs `tidelog maintain --yes`. A run that fails, or that cannot be
  started, raises an alarm.
- **Spark**: if `has_spark` is true, a schedule starts a task with Spark on Fargate, from the image
  of `deploy/Dockerfile --target spark`. So Spark has the version that tidelog needs (4.2).

These checks need no AWS account and pass: `terraform fmt`, the validations of the variables, all
arguments and blocks against the provider's schema (6.62, by `make lint-deploy ARGS=--install`),
checkov, and the test of the policies. The module was never applied to AWS.

After the first apply, set `settings = {{ TIDELOG_CLUSTER_ID = "..." }}` to the id that `tidelog
status` shows. The bucket policy allows `tidelog restore`. To copy a backup into the bucket with
another tool, apply with `is_wal_write_once = false`, copy, and apply with `true` again.
"""


HOURS = 730
"""Of a month."""
TASK_CPU_USD, TASK_GB_USD = 0.04048, 0.004445
ADDRESS_USD, BALANCER_USD, ENDPOINT_USD, NAT_USD = 0.005, 0.0225, 0.01, 0.045
LCU_USD = 0.008
"""Prices of an hour, of AWS's list for us-east-1 in March 2026."""
ALARM_USD, METRIC_USD = 0.10, 0.30
"""Prices of a month."""
ZONES = 3
REQUEST_METRICS = 13
"""Those that S3 makes for a filter."""

BILL_HEAD = """\
The defaults, a month of 730 h in us-east-1, list prices of March 2026. Other regions cost up to
30 % more."""
BILL_FOOT = """\
Under load, the balancer is the largest part: an LCU ({lcu} a month) is 1 GB an hour, so a constant
10 MB/s costs {load}. [Past the balancer](../deploy/README.md#past-the-balancer) it costs nothing.
Traffic between zones costs $0.01 a GB on each side."""


def _task(cpu: float, gigabytes: float) -> float:
    """Return the price of a task that runs all the time."""
    return HOURS * (cpu * TASK_CPU_USD + gigabytes * TASK_GB_USD)


def _default_number(name: str) -> int:
    (variable,) = (v for v in hcl.of_kind("variable") if v.labels[0] == name)
    return int(variable.body["default"])


def bill() -> list[str]:
    """Return the prices of an idle cluster, and of what changes them."""
    brokers = _default_number("brokers_min")
    cpu, gigabytes = (_default_number(f"broker_{part}") / 1024 for part in ("cpu", "memory"))
    (maintain,) = (
        block.body
        for block in hcl.resources("aws_ecs_task_definition")
        if block.labels[1] == "maintain"
    )
    run = _task(maintain["cpu"] / 1024, maintain["memory"] / 1024) + HOURS * ADDRESS_USD
    alarms = hcl.source().count(" comparison = ")
    task, addresses = _task(cpu, gigabytes), brokers * HOURS * ADDRESS_USD
    parts = {
        f"{brokers} tasks of {cpu:g} vCPU and {gigabytes:g} GB": brokers * task,
        f"their {brokers} public addresses": addresses,
        "the balancer, which has no public address": HOURS * BALANCER_USD,
        "maintenance, a run of a minute each hour": run / 60,
        f"{alarms} alarms, and up to {REQUEST_METRICS} metrics of requests to S3": (
            alarms * ALARM_USD + REQUEST_METRICS * METRIC_USD
        ),
    }
    endpoints = [count * ZONES * HOURS * ENDPOINT_USD - addresses for count in (3, 4)]
    options = {
        f"`has_private_endpoints`: 3 endpoints in {ZONES} zones instead of public addresses, "
        f"and $0.01 a GB; {_signed(endpoints[1])} with `secret_settings`": endpoints[0],
        "a NAT gateway in an existing VPC instead of public addresses, and $0.045 a GB of what is "
        "not S3": HOURS * NAT_USD - addresses,
        "tasks of 2 vCPU and 4 GB": brokers * (_task(2, 4) - task),
        f"tasks of {cpu:g} vCPU and 1 GB, with `settings` whose caches and buffers have at most "
        "524 MiB": brokers * (_task(cpu, 1) - task),
        "`brokers_min = 1`: clients wait while ECS replaces the broker": (
            -task - HOURS * ADDRESS_USD
        ),
        "`has_container_insights`, for each metric": METRIC_USD,
    }
    costs = "[as idle brokers cost](../deploy/BENCHMARKS.md#what-it-costs)"
    return [
        BILL_HEAD,
        "",
        *("| what | a month |", "|---|---|"),
        *(_row(what, f"${usd:.2f}") for what, usd in parts.items()),
        _row(
            f"**sum**, without requests to S3 ({costs}) and storage", f"${sum(parts.values()):.2f}"
        ),
        "",
        *("| option | a month |", "|---|---|"),
        *(_row(what, _signed(usd)) for what, usd in options.items()),
        "",
        BILL_FOOT.format(lcu=f"${HOURS * LCU_USD:.2f}", load=f"${36 * HOURS * LCU_USD:.0f}"),
    ]


def _signed(usd: float) -> str:
    return f"{'+' if usd > 0 else '-'} ${abs(usd):.2f}"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def _default(variable: hcl.Block) -> str:
    if "default" not in variable.body:
        return "required"
    value = variable.body["default"]
    written = f'"{hcl.text(value)}"' if isinstance(value, str) else str(value).lower()
    return f"`{written}`"


def variables() -> list[str]:
    rows = [
        _row(
            f"`{variable.labels[0]}`",
            hcl.text(variable.body["description"]),
            f"`{hcl.text(variable.body['type']).removeprefix('${').removesuffix('}')}`",
            _default(variable),
        )
        for variable in sorted(hcl.of_kind("variable"), key=lambda each: "default" in each.body)
    ]
    return ["| variable | | type | default |", "|---|---|---|---|", *rows]


def outputs() -> list[str]:
    rows = [
        _row(f"`{output.labels[0]}`", hcl.text(output.body["description"]))
        for output in hcl.of_kind("output")
    ]
    return ["| output | |", "|---|---|", *rows]


def resources() -> list[str]:
    counted: dict[str, list[str]] = {}
    for resource in hcl.of_kind("resource"):
        counted.setdefault(resource.labels[0], []).append(resource.labels[1])
    rows = [_row(f"`{kind}`", ", ".join(names)) for kind, names in sorted(counted.items())]
    return ["| resource | names |", "|---|---|", *rows]


def readme() -> str:
    """Return the content of the file."""
    example = (hcl.EXAMPLES / "minimal" / "main.tf").read_text(encoding="utf-8")
    minimal = "module" + example.partition("\nmodule")[2].partition("\n}\n")[0] + "\n}"
    parts = [PAGE_HEAD.format(minimal=minimal)]
    for title, lines in (
        ("The bill of an idle cluster", bill()),
        ("Variables", variables()),
        ("Outputs", outputs()),
        ("Resources", resources()),
    ):
        parts.append("\n".join([f"## {title}", "", *lines, ""]))
    return "\n".join(parts)


if __name__ == "__main__":
    sys.stdout.write(readme())
