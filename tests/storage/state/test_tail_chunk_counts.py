"""The chunks of all tails: their counts, and the refusals and seals that keep them in bounds."""

import pytest

from tests.storage.state.test_cluster_state import FIRST, IDS, Spec, applied, chunk
from tests.storage.state.test_principal_shares import ALICE, MALLORY, commit, state_of, usage
from tidelog.storage.codec.entry import Commit
from tidelog.storage.core.acls import ADMIN
from tidelog.storage.core.actions import (
    AnyAction,
    Append,
    CreateTopic,
    DeleteTopic,
    LoseRecords,
    Sealed,
    SetQuotas,
)
from tidelog.storage.state import principal_shares as rules
from tidelog.storage.state import tail_chunk_counts
from tidelog.storage.state.cluster_state import ClusterState
from tidelog.storage.state.principal_shares import TAIL_CHUNKS

ALPHA, BETA, OWN = IDS
BOUND = 40
SHARE = BOUND // rules.PARTS


@pytest.fixture(autouse=True)
def small_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail_chunk_counts, "CHUNKS_MAX", BOUND)


def with_own(principal: str = MALLORY) -> ClusterState:
    """A state whose third topic, of 3 partitions, belongs to the principal."""
    state = state_of()
    assert commit(state, CreateTopic("own", OWN, 3, {}), principal=principal) is None
    return state


def fill(state: ClusterState, count: int, topic_id: str = OWN, partition: int = 0) -> None:
    """Append one chunk in each of so many entries."""
    for _ in range(count):
        spec = Spec(
            0, [chunk(1, topic_id=topic_id, partition=partition)], [Commit(b"", [Append(0, 0, 1)])]
        )
        applied(state, spec)


def refusal(state: ClusterState, *parts: tuple[str, int]) -> str:
    """Why a broker refuses a request for so many partitions of topics; empty if it does not."""
    if state.tail_chunks.has_room(sum(count for _, count in parts)):
        return ""
    return str(state.tail_chunks.refusal(parts, state.access.quota) or "")


def counts(state: ClusterState) -> dict[str, int]:
    """The chunks by topic id. Asserts that they are those of the tails and of a checkpoint."""
    sums = {
        topic.topic_id: sum(len(partition.tail) for partition in topic.partitions)
        for topic in state.topics.values()
    }
    again = ClusterState.decode(state.encode(), "checkpoint")
    assert (usage(again), again.encode()) == (usage(state), state.encode())
    for topic_id, count in sums.items():
        assert state.tail_chunks.of_topic(topic_id) == count
        assert again.tail_chunks.of_topic(topic_id) == count
    assert state.shares.total(TAIL_CHUNKS) == sum(sums.values())
    return {topic_id: count for topic_id, count in sums.items() if count}


def test_the_chunks_of_a_tail_count_for_the_owner_of_the_topic() -> None:
    state = with_own()
    fill(state, 3)
    fill(state, 2, partition=1)
    fill(state, 4, ALPHA)
    assert counts(state) == {OWN: 5, ALPHA: 4}
    assert usage(state)[TAIL_CHUNKS] == {MALLORY: 5, "": 4}
    assert commit(state, Sealed(OWN, 0, 2), principal=ADMIN) is None
    assert counts(state) == {OWN: 3, ALPHA: 4}
    assert commit(state, Sealed(OWN, 0, 2), principal=ADMIN) is None, "a seal that is repeated"
    assert counts(state) == {OWN: 3, ALPHA: 4}
    assert commit(state, Sealed(OWN, 0, 3), Sealed(OWN, 1, 2), Sealed(ALPHA, 0, 3)) is None
    assert counts(state) == {ALPHA: 1}
    assert usage(state)[TAIL_CHUNKS] == {"": 1}


def test_rows_that_continue_a_chunk_are_no_more_chunks() -> None:
    state = with_own()
    commits = [Commit(b"", [Append(0, first, 1)]) for first in (0, 1, 2)]
    applied(state, Spec(0, [chunk(4, topic_id=OWN)], commits))
    assert counts(state) == {OWN: 1}
    lost: AnyAction = LoseRecords(OWN, 0, 1, 2)
    assert commit(state, lost) is None
    assert counts(state) == {OWN: 3}
    assert commit(state, Sealed(OWN, 0, 2)) is None
    assert counts(state) == {OWN: 1}


def test_the_chunks_of_a_deleted_topic_do_not_count() -> None:
    state = with_own()
    fill(state, 2)
    both = [Commit(b"", [Append(0, 0, 1)]), Commit(b"", [DeleteTopic(OWN)])]
    applied(state, Spec(0, [chunk(1, topic_id=OWN)], both))
    assert counts(state) == {}
    assert usage(state)[TAIL_CHUNKS] == {}
    again = [
        Commit(b"", [CreateTopic("own", OWN, 1, {})], principal=ALICE),
        Commit(b"", [Append(0, 0, 1)]),
    ]
    applied(state, Spec(0, [chunk(1, topic_id=OWN)], again))
    assert counts(state) == {OWN: 1}
    assert usage(state)[TAIL_CHUNKS] == {ALICE: 1}


def test_an_owner_has_a_share_and_a_quota_of_partitions_raises_it() -> None:
    state = with_own()
    other = "d" * 32
    assert commit(state, CreateTopic("other", other, 3, {})) is None
    fill(state, SHARE - 3)
    fill(state, 2, other)
    assert not refusal(state, (OWN, 1))
    assert not refusal(state, (ALPHA, SHARE))
    text = refusal(state, (OWN, 1), (other, 1))
    assert text.startswith(
        f"the principal {MALLORY} has {SHARE - 1} of its {SHARE} chunks of records that are not "
        "sealed and needs 2 more: brokers seal them now"
    )
    assert text.endswith("(bound tail_chunks)")
    quota = SetQuotas(MALLORY, {rules.PARTITIONS: 2})
    assert commit(state, quota, principal=ADMIN) is None
    assert not refusal(state, (OWN, 1), (other, 2))
    assert commit(state, Sealed(OWN, 0, 1)) is None
    assert not refusal(state, (OWN, 3), (other, 4))


def test_a_topic_has_a_quarter_whoever_owns_it() -> None:
    state = with_own(ADMIN)
    fill(state, SHARE)
    assert refusal(state, (OWN, 1)).startswith(f"the topic 'own' has {SHARE} of its {SHARE} ")
    assert not refusal(state, (ALPHA, SHARE))
    assert refusal(state, (ALPHA, 1), (ALPHA, SHARE)), "of one request together"
    assert not refusal(state, ("unknown", BOUND + 1)), "`apply` refuses it"


def test_all_topics_together_have_the_bound() -> None:
    state = with_own()
    fill(state, BOUND - 1, ALPHA)
    assert refusal(state, (OWN, 2)).startswith(f"the cluster has {BOUND - 1} of its {BOUND} ")
    assert not refusal(state, (OWN, 1))


def test_apply_never_refuses_records_for_the_bound() -> None:
    state = with_own()
    fill(state, 2 * BOUND)
    assert counts(state) == {OWN: 2 * BOUND}
    assert commit(state, Sealed(OWN, 0, 2 * BOUND)) is None
    assert counts(state) == {}


def test_topics_of_a_crowded_owner_are_sealed_from_half_of_their_mean_on() -> None:
    state = with_own()
    small = "d" * 32
    assert commit(state, CreateTopic("small", small, 3, {})) is None

    def crowded(fullness: float) -> dict[str, float]:
        return state.tail_chunks.crowded(fullness, state.access.quota)

    fill(state, 1, small)
    fill(state, SHARE // 2 - 1)
    fill(state, 1, ALPHA)
    assert crowded(1 / 2) == {}
    fill(state, 1)
    assert crowded(1 / 2) == {MALLORY: (SHARE // 2 + 1) / 2 / 2}
    assert crowded(3 / 4) == {}
    fill(state, BOUND // 2, BETA)
    assert crowded(3 / 4) == {}
    total = BOUND // 2 + SHARE // 2 + 2
    assert crowded(1 / 2) == {MALLORY: (SHARE // 2 + 1) / 2 / 2, "": total / 4 / 2}
    assert len(FIRST.commits) + 2 == 4, "the topics"
