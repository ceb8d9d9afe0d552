"""The rights that operations need, each declared once for all protocols.

A route of REST declares the same right as a `Permission`. The router checks it before the handler
begins.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from tidelog.service.security.caller import ALL_RIGHTS, CallerRights, Forbidden, forbidden
from tidelog.service.slices import sliced
from tidelog.storage.core import acls
from tidelog.storage.core.acls import CLUSTER, CLUSTER_NAME, GROUP, TOPIC


@dataclass(frozen=True, slots=True)  # a produce or fetch request checks one for each partition
class Right:
    """A right to do an operation of Kafka's on a resource of this type."""

    operation: str
    resource_type: str

    def is_granted(self, rights: CallerRights, name: str = CLUSTER_NAME) -> bool:
        """Whether the caller has the right to a resource, as the view of this broker says."""
        return rights is ALL_RIGHTS or rights.may(self.operation, self.resource_type, name)

    async def check(self, rights: CallerRights, name: str = CLUSTER_NAME) -> None:
        """Raise Forbidden unless the caller has the right, also after a refresh of the view.

        If the caller's key was revoked, raise Unauthenticated.
        """
        if not self.is_granted(rights, name):
            await rights.check(self.operation, self.resource_type, name)

    async def check_all(self, rights: CallerRights, names: Iterable[str]) -> None:
        """Raise Forbidden unless the caller has the right to all resources."""
        async for name in sliced(dict.fromkeys(names)):
            await self.check(rights, name)

    def refusal(self, rights: CallerRights, name: str) -> Forbidden:
        """Return the error of a caller without the right."""
        return forbidden(rights.principal, self.operation, self.resource_type, name)


DESCRIBE_TOPIC = Right(acls.DESCRIBE, TOPIC)
"""Also its offsets, and the offsets and the lag of groups in it."""
CREATE_TOPIC = Right(acls.CREATE, TOPIC)
CREATE_TOPICS = Right(acls.CREATE, CLUSTER)
ALTER_TOPIC = Right(acls.ALTER, TOPIC)
DELETE_TOPIC = Right(acls.DELETE, TOPIC)
"""Also to delete its records."""
DESCRIBE_CONFIGS = Right(acls.DESCRIBE_CONFIGS, TOPIC)
ALTER_CONFIGS = Right(acls.ALTER_CONFIGS, TOPIC)

PRODUCE = Right(acls.WRITE, TOPIC)
PRODUCE_IDEMPOTENTLY = Right(acls.IDEMPOTENT_WRITE, CLUSTER)
FETCH = Right(acls.READ, TOPIC)
"""Also to subscribe to it, and to set or delete offsets of groups in it."""

DESCRIBE_GROUP = Right(acls.DESCRIBE, GROUP)
JOIN_GROUP = Right(acls.READ, GROUP)
"""Also to commit or reset its offsets."""
DELETE_GROUP = Right(acls.DELETE, GROUP)
"""Also to delete its offsets."""

DESCRIBE_CLUSTER = Right(acls.DESCRIBE, CLUSTER)
"""Also all groups and all ACLs."""
DESCRIBE_DEFAULTS = Right(acls.DESCRIBE_CONFIGS, CLUSTER)
ALTER_DEFAULTS = Right(acls.ALTER_CONFIGS, CLUSTER)
"""Also quotas."""
ALTER_ACCESS = Right(acls.ALTER, CLUSTER)
