"""Operations on records: what producers, consumers and transactions may do.

Appends and fetches of one topic check `PRODUCE` and `FETCH` inline, where they have the topic,
because some requests have thousands of partitions.
"""

from collections.abc import Iterable

from tidelog.service.operations.rights import (
    DESCRIBE_TOPIC,
    FETCH,
    JOIN_GROUP,
    PRODUCE,
    PRODUCE_IDEMPOTENTLY,
)
from tidelog.service.security.caller import CallerRights, Forbidden
from tidelog.service.slices import sliced
from tidelog.storage.broker import Broker


class RecordOperations:
    """Stateless."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    async def reserve_producer_id(self, rights: CallerRights) -> int:
        """Return a new id of an idempotent producer.

        As in Kafka, the right to write to at least one topic implies idempotent writes. Raises
        Forbidden, and the errors of a commit.
        """
        if not await self._may_produce(rights):
            await PRODUCE_IDEMPOTENTLY.check(rights)
        return await self._broker.kafka.reserve_producer_id()

    async def check_transaction(
        self,
        rights: CallerRights,
        topics: Iterable[str],
        groups: Iterable[tuple[str, Iterable[str]]],
    ) -> None:
        """Raise Forbidden unless the caller may write to `topics` and commit each group's offsets.

        `groups` are pairs of a group and the topics of its offsets.
        """
        await PRODUCE.check_all(rights, topics)
        for group_id, offset_topics in groups:
            await JOIN_GROUP.check(rights, group_id)
            await FETCH.check_all(rights, offset_topics)

    async def check_matched(self, rights: CallerRights, topic: str) -> None:
        """Raise Forbidden unless the caller may read the topic, which a pattern may have matched.

        The message names the topic only if the caller may describe it.
        """
        if DESCRIBE_TOPIC.is_granted(rights, topic):
            await FETCH.check(rights, topic)
        elif not FETCH.is_granted(rights, topic):
            rights.check_valid()
            raise Forbidden(
                "not authorized: the instance reads a topic that the caller may not read"
            )

    async def _may_produce(self, rights: CallerRights) -> bool:
        if PRODUCE_IDEMPOTENTLY.is_granted(rights):
            return True
        async for name in sliced(list(self._broker.state.topics)):
            if PRODUCE.is_granted(rights, name):
                return True
        return False
