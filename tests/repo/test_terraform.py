"""terraform/ without the provider: names exist and are used; the promises of the bucket."""

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError

from terraform import hcl, readme, schema
from tests.support.iam import permissions
from tests.support.moto import running_moto
from tests.support.seaweed import ACCESS_KEY, REGION, SECRET_KEY
from tidelog.service.server.serve import STOP_S_MAX
from tidelog.service.settings.settings import load

SOURCE = hcl.source()


def local_names() -> set[str]:
    return {name for block in hcl.of_kind("locals") for name in hcl.members(block.body)}


def variables() -> dict[str, Any]:
    return {block.labels[0]: block.body for block in hcl.of_kind("variable")}


def test_the_readme_is_what_the_code_says() -> None:
    text = (hcl.MODULE / "README.md").read_text()
    assert text == readme.readme(), "python -m terraform.readme writes it"


def test_names_that_are_used_exist() -> None:
    assert set(re.findall(r"\bvar\.(\w+)", SOURCE)) <= set(variables())
    assert set(re.findall(r"\blocal\.(\w+)", SOURCE)) <= local_names()
    used = set(re.findall(r"(?<![\w.])((?:data\.)?aws_\w+\.\w+)\b", SOURCE))
    assert len(used) > 30
    assert used <= {block.address for block in hcl.blocks()}


def test_nothing_is_unused() -> None:
    assert set(variables()) == set(re.findall(r"\bvar\.(\w+)", SOURCE))
    assert set(re.findall(r"\blocal\.(\w+)", SOURCE)) == local_names()
    data = {block.address for block in hcl.of_kind("data")}
    assert all(address in SOURCE for address in data)


def test_variables_and_outputs_say_what_they_are() -> None:
    for name, body in variables().items():
        assert "type" in body, name
        assert hcl.text(body["description"]).endswith("."), name
    for output in hcl.of_kind("output"):
        assert hcl.text(output.body["description"]).endswith("."), output.labels
    checked = [name for name, body in variables().items() if "validation" in body]
    assert len(checked) > 15


@pytest.mark.parametrize("name", ["minimal", "production"])
def test_an_example_gives_what_the_module_takes(name: str) -> None:
    (module,) = hcl.of_kind("module", hcl.EXAMPLES / name)
    arguments = set(hcl.members(module.body)) - {"source"}
    assert arguments <= set(variables())
    assert arguments >= {name for name, body in variables().items() if "default" not in body}
    assert (hcl.EXAMPLES / name / hcl.text(module.body["source"])).resolve() == hcl.MODULE


def one(kind: str) -> dict[str, Any]:
    (block,) = hcl.resources(kind)
    return hcl.members(block.body)


def test_no_rule_takes_an_object_of_the_log() -> None:
    rules = hcl.inner(one("aws_s3_bucket_lifecycle_configuration")["rule"])
    assert [sorted(hcl.members(rule)) for rule in rules] == [
        ["abort_incomplete_multipart_upload", "filter", "id", "status"]
    ]
    assert not hcl.resources("aws_s3_bucket_versioning")


def test_the_bucket_is_private_and_encrypted() -> None:
    public = one("aws_s3_bucket_public_access_block")
    assert [public.pop("bucket"), set(public.values())] == ["${aws_s3_bucket.log.id}", {True}]
    assert len(public) == 4
    (rule,) = hcl.inner(one("aws_s3_bucket_server_side_encryption_configuration")["rule"])
    assert "AES256" in str(rule["apply_server_side_encryption_by_default"])
    assert one("aws_lb")["internal"] is True


@pytest.mark.parametrize("is_write_once", [True, False])
def test_policies_are_json(is_write_once: bool) -> None:
    for path in (hcl.MODULE / "policies").iterdir():
        words = {"bucket_arn": "arn:aws:s3:::b", "prefix": "p"}
        name = path.name.partition(".")[0]
        policy = json.loads(hcl.template(name, **words, is_wal_write_once=is_write_once))
        sids = [statement["Sid"] for statement in policy["Statement"]]
        assert len(set(sids)) == len(sids)
        assert ("WalIsWrittenOnce" in sids) == (name == "bucket" and is_write_once)
        for _, action, resource in permissions(policy):
            assert "*" not in action
            assert resource == "arn:aws:s3:::b" or resource.startswith("arn:aws:s3:::b/p/")


def test_only_roles_of_the_module_get_policies_that_are_there() -> None:
    names = set(re.findall(r'"(\w+)"', SOURCE.partition("for role in [")[2].partition("]")[0]))
    assert names == {"broker", "maintain", "reader"}
    assert {path.name for path in (hcl.MODULE / "policies").iterdir()} == {
        f"{name}.json.tftpl" for name in names | {"bucket"}
    }


def test_settings_are_settings() -> None:
    names = set(re.findall(r"\bTIDELOG_[A-Z0-9_]+(?= *=)", SOURCE))
    example = hcl.source(hcl.EXAMPLES / "production")
    memory = dict(re.findall(r'(TIDELOG_[A-Z_]+) *= "(\d+)"', example))
    assert len(names) >= 7
    number = dict.fromkeys(names, "8083") | {"TIDELOG_STORE": "memory://", "TIDELOG_HOST": "h"}
    load({}, number | memory)
    (task,) = re.findall(r"broker_memory = (\d+)", example)
    assert sum(map(int, memory.values())) + 2**30 < int(task) * 2**20


def test_a_broker_of_the_default_size_holds_its_default_buffers() -> None:
    """The same buffers are in the formula of deploy/README.md."""
    match = re.search(r"broker_buffers = \{(.*?)\}", SOURCE, re.DOTALL)
    assert match is not None
    buffers = {name: int(size) for name, size in re.findall(r"TIDELOG_(\w+) += (\d+)", match[1])}
    settings = load({}, {})
    assert buffers == {name: getattr(settings, name.lower()) for name in buffers}
    page = (hcl.MODULE.parent / "deploy" / "README.md").read_text()
    (formula,) = re.findall(r"^\| memory of a broker \| (.*?) \|", page, re.MULTILINE)
    assert {name.upper() for name in re.findall(r"`(\w+)`", formula)} == set(buffers)
    memory, cpu = (variables()[name]["default"] for name in ("broker_memory", "broker_cpu"))
    assert 500 * 2**20 + sum(buffers.values()) <= memory * 2**20
    assert 2 * cpu <= memory <= 8 * cpu, "sizes of Fargate"


def test_only_the_balancer_and_brokers_connect_to_brokers() -> None:
    """So a public address of a task is of no use from outside."""
    rules = [members for members in ingress_rules() if "brokers" in members["security_group_id"]]
    assert len(rules) == 2
    for rule in rules:
        assert "cidr_ipv4" not in rule
        assert "aws_security_group." in rule["referenced_security_group_id"]
    clients = [rule for rule in ingress_rules() if "clients" in str(rule["description"]).lower()]
    assert [rule["cidr_ipv4"] for rule in clients] == ["${each.value}"]
    assert '"0.0.0.0/0"' in str(variables()["client_cidrs"]["validation"]), "which it refuses"


def ingress_rules() -> list[dict[str, Any]]:
    rules = hcl.resources("aws_vpc_security_group_ingress_rule")
    return [hcl.members(rule.body) for rule in rules]


def test_tasks_have_a_way_to_aws_with_and_without_endpoints() -> None:
    """A public address goes with the route to the internet, the other way with the endpoints."""
    assert variables()["has_private_endpoints"]["default"] is False
    networks = re.findall(r"network_configuration \{(.*?)\}", SOURCE, re.DOTALL)
    assert len(networks) == 3, "brokers, maintenance, Spark"
    for network in networks:
        assert re.search(r"assign_public_ip = local\.is_public\n", network)
    expected = {
        "is_public": "local.has_own_vpc ? !var.has_private_endpoints : var.has_public_subnets",
        "has_internet": "local.has_own_vpc && !var.has_private_endpoints",
        "has_endpoints": "local.has_own_vpc && var.has_private_endpoints",
    }
    for name, expression in expected.items():
        assert re.findall(rf"\b{name} += (.*)", SOURCE) == [expression]
    for kind in ("aws_internet_gateway", "aws_route"):
        assert "local.has_internet" in one(kind)["count"]
    endpoints = {block.labels[1]: block.body for block in hcl.resources("aws_vpc_endpoint")}
    assert "local.has_own_vpc" in endpoints["s3"]["count"], "free, so always"
    assert endpoints["interface"]["for_each"] == "${local.endpoints}"
    assert re.findall(r"endpoints += (.*)", SOURCE)[-1] == (
        "toset(local.has_endpoints ? local.services : [])"
    )


def test_the_grace_period_is_longer_than_a_shutdown() -> None:
    (seconds,) = re.findall(r"stopTimeout\s*= (\d+)", SOURCE)
    assert int(seconds) > load({}, {}).drain_ms / 1000 + STOP_S_MAX


def test_the_schema_is_read_as_the_provider_means_it(tmp_path: Path) -> None:
    """The check that `make lint-deploy` does on 6,000 classes, on two of them."""
    folder = tmp_path / "s3"
    folder.mkdir()
    (folder / "__init__.py").write_text(
        "class AwsThing:\n"
        "    'docs/resources/thing#id AwsThing#id'\n"
        "    def __init__(self, *, name: str, and_: int = 1,\n"
        "                 rule: \"Sequence['AwsThing.RuleProperty']\" = None): ...\n"
        "    class RuleProperty:\n"
        "        def __init__(self, *, days: int): ...\n"
    )
    provider_schema = schema.Schema(tmp_path)
    block = {hcl.IS_BLOCK: True}

    def wrong(**body: object) -> list[str]:
        return list(schema.wrong(provider_schema, hcl.Block("resource", ("aws_thing", "x"), body)))

    assert wrong(name=1, **{"and": 2, "count": 3}) == []
    assert wrong(name=1, rule=[{**block, "days": 1}]) == []
    assert wrong(rule=[{**block, "day": 1}]) == [
        "aws_thing.x: name is missing",
        "aws_thing.x.rule[0]: there is no day",
        "aws_thing.x.rule[0]: days is missing",
    ]
    absent = hcl.Block("resource", ("aws_nothing", "x"), {})
    assert list(schema.wrong(provider_schema, absent)) == ["aws_nothing.x: there is no aws_nothing"]


def test_aws_takes_the_policies_as_they_are() -> None:
    """By moto, which has IAM's grammar for policies."""
    keys = {"aws_access_key_id": ACCESS_KEY, "aws_secret_access_key": SECRET_KEY}
    words = {"bucket_arn": "arn:aws:s3:::policies", "prefix": "cluster", "is_wal_write_once": True}
    # Of its own: all servers of moto in a process have the same buckets, and a policy stays.
    with running_moto("policies") as server, contextlib.ExitStack() as stack:
        place = {"endpoint_url": server.endpoint_url, "region_name": REGION, **keys}
        iam, s3 = (
            stack.enter_context(contextlib.closing(boto3.client(name, **place)))
            for name in ("iam", "s3")
        )
        for role in ("broker", "maintain", "reader"):
            answer = iam.create_policy(PolicyName=role, PolicyDocument=hcl.template(role, **words))
            assert answer["Policy"]["Arn"].endswith(f"/{role}")
        broken = hcl.template("reader", **words).replace('"Allow"', '"Perhaps"')
        with pytest.raises(ClientError, match="MalformedPolicyDocument"):
            iam.create_policy(PolicyName="broken", PolicyDocument=broken)
        s3.put_bucket_policy(Bucket=server.bucket, Policy=hcl.template("bucket", **words))
        policy = json.loads(s3.get_bucket_policy(Bucket=server.bucket)["Policy"])
        assert [statement["Sid"] for statement in policy["Statement"]] == [
            "TlsOnly",
            "WalIsWrittenOnce",
        ]
