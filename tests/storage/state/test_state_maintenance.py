"""Effects of maintenance on the cluster state: log starts move, tombstones are dropped."""

from tests.storage.state.test_cluster_state import (
    FIRST,
    IDS,
    Spec,
    appending,
    applied,
    chunk,
    with_records,
)
from tidelog.storage.codec.entry import Commit
from tidelog.storage.core.actions import (
    Append,
    Chunk,
    CreateTopic,
    DeleteTopic,
    ForgetTopic,
    MoveLogStart,
)
from tidelog.storage.core.errors import UnknownTopic
from tidelog.storage.state.cluster_state import ClusterState


def test_a_log_start_moves_up_to_the_high_watermark_and_never_back() -> None:
    state = ClusterState("c")
    six = Chunk(IDS[0], 0, 0, 90, 1, 6, 0, 5, False, "", 90)
    applied(state, FIRST, Spec(0, [six], [Commit(b"", [Append(0, 0, 6)])]))
    partition_state = state.partition("alpha", 0)
    for offset, expected in ((2, 2), (6, 6), (1, 6), (7, 6)):
        action = MoveLogStart(IDS[0], 0, offset)
        ((outcome,),) = applied(state, Spec(0, [], [Commit(b"", [action])]))
        assert (outcome.refusal is None) is (offset <= 6)
        assert partition_state.log_start_offset == expected
    assert (
        partition_state.sealed_end,
        partition_state.high_watermark,
        len(partition_state.tail),
    ) == (0, 6, 1)
    for topic_id, partition in ((IDS[0], 2), (IDS[2], 0)):
        action = MoveLogStart(topic_id, partition, 0)
        ((outcome,),) = applied(state, Spec(0, [], [Commit(b"", [action])]))
        assert outcome.refusal is not None
    assert ClusterState.decode(state.encode(), "x").partition("alpha", 0) == partition_state


def test_a_tombstone_is_dropped_by_its_action() -> None:
    state = ClusterState("c")
    applied(state, FIRST, Spec(5, [], [Commit(b"", [DeleteTopic(IDS[0])])]))
    for topic_id, left in ((IDS[1], 1), (IDS[0], 0), (IDS[0], 0)):
        ((outcome,),) = applied(state, Spec(5, [], [Commit(b"", [ForgetTopic(topic_id)])]))
        assert outcome.refusal is None
        assert len(state.deleted) == left
    assert list(state.topics) == ["beta"]


def test_a_topic_created_again_is_another_topic() -> None:
    state = with_records(4)
    applied(
        state,
        Spec(5, [], [Commit(b"", [DeleteTopic(IDS[0])])]),
        Spec(6, [], [Commit(b"", [CreateTopic("alpha", IDS[2], 1, {})])]),
    )
    assert state.partition("alpha", 0).high_watermark == 0
    ((outcome,),) = applied(state, appending((0, 0, 1), chunks=[chunk(1)]))
    assert isinstance(outcome.refusal, UnknownTopic)
    assert [
        (deleted_topic.topic_id, deleted_topic.deleted_ms) for deleted_topic in state.deleted
    ] == [(IDS[0], 5)]
    assert ClusterState.decode(state.encode(), "x").encode() == state.encode()
