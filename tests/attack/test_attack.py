"""The attacks in a small form, all on one broker, which withstands them."""

from collections.abc import Iterator

import pytest

from tests.attack.__main__ import prepare, row
from tests.attack.attacks import attacks
from tests.attack.measure import Result, measured
from tests.support.broker import Broker
from tests.support.ports import free_port

SCALE = 0.01

pytestmark = pytest.mark.xdist_group("attack")  # one broker for all


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(tmp_path_factory.mktemp("attack"), is_fresh=True, kafka_port=free_port()) as broker:
        prepare(broker)
        yield broker


@pytest.mark.parametrize("name", attacks(SCALE))
def test_a_broker_withstands_the_attack(broker: Broker, name: str) -> None:
    result = measured(broker, name, attacks(SCALE)[name], rest_s=0.0)
    assert not result.why_failed, row(result)
    assert "FAILED" not in result.answers, row(result)
    assert result.done > 0


def test_a_row_names_the_reason_of_a_failure() -> None:
    good = Result("a", "", 1, 1024, 3, 0.1, 5, 0, 0.1, True)
    assert not good.why_failed
    assert good._replace(is_alive=False).why_failed == "the broker ended"
    assert good._replace(peak_mib=1025).why_failed == "memory above 1024 MiB"
    assert good._replace(bugs=("bug in x",)).why_failed == "a bug: bug in x"
    bad = good._replace(failed=1, faults=("POST 503",))
    assert "FAILED: the neighbour failed: POST 503" in row(bad)
