"""The parts of a broker that the handlers of all APIs use."""

import logging

from tidelog.service.http.admission import Budget
from tidelog.service.kafka.errors import Code, Kind, code_of
from tidelog.service.settings import Settings
from tidelog.service.telemetry.kafka_counters import KafkaCounters
from tidelog.service.telemetry.metrics import HttpCounters
from tidelog.storage.broker import Broker
from tidelog.storage.core.errors import Corrupt, LogError
from tidelog.storage.state.cluster_state import Topic

log = logging.getLogger("tidelog.kafka")


class Context:
    """The parts of a broker that handlers use. One per listener."""

    def __init__(
        self,
        broker: Broker,
        settings: Settings,
        counters: KafkaCounters,
        traffic: HttpCounters,
        answers: Budget,
    ) -> None:
        self.broker = broker
        self.batches = broker.kafka
        self.settings = settings
        self.counters = counters
        self.traffic = traffic
        """Counts the records and bytes of topics, over all protocols."""
        self.answers = answers
        """The memory of the answers with records, over all protocols."""
        self.is_draining = False
        """Whether the broker is stopping. Then it refuses records and reads with the code that
        sends clients to another broker."""

    def failed(self, api: str, error: BaseException) -> None:
        """Log an exception that no handler expects."""
        log.error("bug in Kafka's %s", api, exc_info=error)

    def refusal(self, api: str, code: Code) -> Code:
        """Count an error of an answer, and return it."""
        self.counters.errors[api, code.name] += 1
        return code

    def code(self, api: str, error: LogError, kind: Kind) -> Code:
        """Return the code for an error of the log, and count it. Log damage and bugs."""
        code = code_of(error, kind)
        if code is Code.UNKNOWN_SERVER_ERROR or isinstance(error, Corrupt):
            log.error("Kafka's %s: %s", api, error)
        return self.refusal(api, code)

    def topic(self, name: str, topic_id: bytes | None) -> Topic | None:
        """Return a topic by its id or, where `topic_id` is None, by its name."""
        state = self.broker.state
        if topic_id is None:
            return state.topics.get(name)
        return state.topic_of_id(topic_id.hex())
