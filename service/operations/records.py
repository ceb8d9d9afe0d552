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
    check_all,
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
            await rights.check(PRODUCE_IDEMPOTENTLY)
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
        await check_all(rights, PRODUCE, topics)
        for group_id, offset_topics in groups:
            await rights.check(JOIN_GROUP, group_id)
            await check_all(rights, FETCH, offset_topics)

    async def check_matched(self, rights: CallerRights, topic: str) -> None:
        """Raise Forbidden unless the caller may read the topic, which a pattern may have matched.

        The message names the topic only if the caller may describe it.
        """
        if rights.may(DESCRIBE_TOPIC, topic):
            await rights.check(FETCH, topic)
        elif not rights.may(FETCH, topic):
            rights.check_valid()
            raise Forbidden(
                "not authorized: the instance reads a topic that the caller may not read"
            )

    async def _may_produce(self, rights: CallerRights) -> bool:
        if rights.may(PRODUCE_IDEMPOTENTLY):
            return True
        async for name in sliced(list(self._broker.state.topics)):
            if rights.may(PRODUCE, name):
                return True
        return False
