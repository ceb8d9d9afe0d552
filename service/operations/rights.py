"""The rights that requests need, each declared once for all protocols.

A route of REST declares its right in a `Permission`, which the router checks before the handler.
"""

from collections.abc import Iterable

from tidelog.service.security.caller import CallerRights
from tidelog.service.slices import sliced
from tidelog.storage.core import acls
from tidelog.storage.core.acls import CLUSTER, GROUP, TOPIC, Right

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


async def check_all(rights: CallerRights, right: Right, names: Iterable[str]) -> None:
    """Raise Forbidden unless the caller has the right to all resources."""
    async for name in sliced(dict.fromkeys(names)):
        await rights.check(right, name)
