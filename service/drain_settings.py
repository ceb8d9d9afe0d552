"""The setting of a broker's drain (service.server.drain)."""

from tidelog.service.setting_fields import setting

DRAIN_MS = setting(
    5000,
    "time for which a broker serves all requests after SIGTERM or SIGINT, before it closes its "
    "port. In this time `/ready` answers 503 and each answer ends its connection, so that "
    "balancers and clients go to other brokers. Without connections, the time ends early; a "
    "second signal ends it",
    low=0,
    high=600_000,
)
