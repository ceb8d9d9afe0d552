"""terraform/README.md, from the code: what there is, and what each variable means.

    python -m terraform.readme > terraform/README.md

A test compares the file with what this writes.
"""

import sys

from terraform import hcl

HEAD = """\
# terraform

A tidelog cluster on AWS. Written by `python -m terraform.readme` from the files beside it; change
those.

```
{minimal}
```

[examples/production](examples/production/main.tf) has a VPC that is there, TLS, a key, Spark and
alarms.

- **Bucket**: private, encrypted, TLS only; overwriting a WAL entry is refused by the bucket
  itself; no rule expires or moves an object, because what is garbage only the log knows.
  Versioning is off: `storage.tf` says why.
- **Rights**: brokers create and read, and delete their own traces; maintenance deletes garbage as
  well; readers read. A test holds the policies in `policies/` to the calls that a broker and
  maintenance were seen to make, both ways: nothing that they call is missing, and nothing is
  allowed that they do not call.
- **Network**: a VPC without a way to the internet, S3 by a gateway endpoint (free), or yours.
- **Brokers**: Fargate behind an internal balancer, scaled by CPU; a task ends in its own time (30
  s).
- **Maintenance**: `tidelog maintain --yes` by EventBridge; what could not be started or failed
  raises an alarm.
- **Spark**: an EMR Serverless application and its schedule, where `has_spark`. Its image holds
  tidelog and `deploy/jobs`; the entry point is `spark_command.py`.

What was checked here without an account: `terraform fmt`, every argument and block against the
provider's schema (6.62, by `make lint-deploy ARGS=--install`), checkov, and the policies as
above. Nothing was applied to AWS.

After the first apply, set `settings = {{ TIDELOG_CLUSTER_ID = "..." }}` to what `tidelog status`
shows. To copy a backup back, apply with `is_wal_write_once = false`, copy, apply again.
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
    """The file."""
    example = (hcl.EXAMPLES / "minimal" / "main.tf").read_text(encoding="utf-8")
    minimal = "module" + example.partition("\nmodule")[2].partition("\n}\n")[0] + "\n}"
    parts = [HEAD.format(minimal=minimal)]
    for title, lines in (
        ("Variables", variables()),
        ("Outputs", outputs()),
        ("Resources", resources()),
    ):
        parts.append("\n".join([f"## {title}", "", *lines, ""]))
    return "\n".join(parts)


if __name__ == "__main__":
    sys.stdout.write(readme())
