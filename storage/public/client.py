"""The public names of the Python client: `from tidelog.client import Consumer, Producer`.

They need `pip install tidelog` alone, without an extra. service/docs/CLIENT.md has examples.
"""

from tidelog.service.client.admin import AsyncAdmin
from tidelog.service.client.blocking import Admin, Consumer, Producer, Transaction
from tidelog.service.client.consumer import AsyncConsumer, DeadLetters
from tidelog.service.client.errors import (
    BadArgument,
    ClientError,
    Closed,
    NotABroker,
    NotFound,
    NotReachable,
    Refused,
    UndecodableRecord,
)
from tidelog.service.client.producer import AsyncProducer, Delivered, ProducerOptions
from tidelog.service.client.records import Header, Record
from tidelog.service.client.transactions import AsyncTransaction
from tidelog.storage.core.model import TopicPartition

__all__ = [
    "Admin",
    "AsyncAdmin",
    "AsyncConsumer",
    "AsyncProducer",
    "AsyncTransaction",
    "BadArgument",
    "ClientError",
    "Closed",
    "Consumer",
    "DeadLetters",
    "Delivered",
    "Header",
    "NotABroker",
    "NotFound",
    "NotReachable",
    "Producer",
    "ProducerOptions",
    "Record",
    "Refused",
    "TopicPartition",
    "Transaction",
    "UndecodableRecord",
]
