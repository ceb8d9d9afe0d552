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
- **Network**: a new VPC without internet access, with a gateway endpoint for S3 (free), or an
  existing VPC.
- **Brokers**: Fargate behind an internal balancer, scaled by CPU load. A task has 30 s to stop.
- **Maintenance**: EventBridge runs `tidelog maintain --yes`. A run that fails, or that cannot be
  started, raises an alarm.
- **Spark**: if `has_spark` is true, a schedule starts a task with Spark on Fargate, from the image
  of `deploy/Dockerfile --target spark`. So Spark has the version that tidelog needs (4.2).

These checks need no AWS account and pass: `terraform fmt`, all arguments and blocks against the
provider's schema (6.62, by `make lint-deploy ARGS=--install`), checkov, and the test of the
policies. The module was never applied to AWS.

After the first apply, set `settings = {{ TIDELOG_CLUSTER_ID = "..." }}` to the id that `tidelog
status` shows. The bucket policy allows `tidelog restore`. To copy a backup into the bucket with
another tool, apply with `is_wal_write_once = false`, copy, and apply with `true` again.
"""


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
        ("Variables", variables()),
        ("Outputs", outputs()),
        ("Resources", resources()),
    ):
        parts.append("\n".join([f"## {title}", "", *lines, ""]))
    return "\n".join(parts)


if __name__ == "__main__":
    sys.stdout.write(readme())
