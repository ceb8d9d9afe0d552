"""Dependencies, parameters and errors that the handlers of FastAPI's routes share.

A handler that reads the cluster's state, or decides by it, must first see all commits that were
acknowledged before the request arrived (I3). So it takes the broker from `FreshBroker`, which
refreshes the view. Handlers change the state only through operations.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any, Generic, NamedTuple, TypeAlias, TypeVar

from fastapi import Depends, Path, Query, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from tidelog.service.formats.resources_v3 import ListMetadata, ResourceFactory
from tidelog.service.formats.strict_bodies import StrictModel, WholeNumber
from tidelog.service.http.errors import NoSuchResource, TopicNotHosted
from tidelog.service.http.media_types import JSON_V2
from tidelog.service.http.route import V3
from tidelog.service.http.urls import client_url
from tidelog.service.operations.change_request import HttpChange
from tidelog.service.operations.operations import Operations
from tidelog.service.security.authenticator import Security
from tidelog.service.security.caller import CallerRights, rights_of
from tidelog.service.slices import in_order
from tidelog.storage.broker import Broker
from tidelog.storage.core.errors import InvalidRequest, UnknownTopic
from tidelog.storage.state.topic import Topic

SECURITY_IS_OFF = "SecurityDisabledException: No Authorizer is configured on the broker."

T = TypeVar("T")
Item = TypeVar("Item", bound=BaseModel)
ConfigValue: TypeAlias = str | int | float | bool | None
"""A config's value as clients send it."""


class V2Response(JSONResponse):
    """JSON with the v2 dialect's media type."""

    media_type = JSON_V2.decode()


# -- errors, for the documentation

ERRORS = {
    400: "a name with control characters, or an invalid parameter",
    404: "no such topic or partition",
    422: "the body is invalid",
    503: "the object store does not answer: try again",
}
CHANGE_ERRORS = {
    413: "the body is over its limit",
    415: "the Content-Type of the body is not JSON",
    504: "the outcome is unknown: check the state before you try again",
}
CREATE_ERRORS = {**CHANGE_ERRORS, 400: "the topic exists, or a name or config is invalid"}
SECURITY_ERRORS = {
    400: "40002: security is off, or a value is invalid",
    401: "40101: no valid key",
    403: "40301: the key's principal is not authorized",
    503: ERRORS[503],
}
"""The errors of routes of keys, quotas and the login."""
SECURITY_LABEL = "security"

# -- the broker


def broker_of(request: Request) -> Broker:
    """Return the broker, without a refresh of its view."""
    broker: Broker = request.app.state.broker
    return broker


async def fresh_broker(request: Request) -> Broker:
    """Refresh the broker's view, and return the broker.

    Its state then has all changes that were acknowledged before the request.
    """
    broker = broker_of(request)
    await broker.refresh()
    return broker


async def rights_of_caller(request: Request) -> CallerRights:
    """Return the caller's rights. If security is off, they allow everything."""
    return rights_of(request.scope)


async def required_security(request: Request) -> Security:
    """Return the broker's security.

    If security is off, raise InvalidRequest, the answer of a Kafka cluster without an authorizer.
    """
    security: Security | None = request.app.state.security
    if security is None:
        raise InvalidRequest(SECURITY_IS_OFF)
    return security


async def operations_of_broker(request: Request) -> Operations:
    """Return the broker's operations."""
    operations: Operations = request.app.operations
    return operations


async def change_of_caller(request: Request) -> HttpChange:
    """Return the change that the request makes."""
    return HttpChange(await rights_of_caller(request))


FreshBroker = Annotated[Broker, Depends(fresh_broker)]
BrokerOperations = Annotated[Operations, Depends(operations_of_broker)]
CallerChange = Annotated[HttpChange, Depends(change_of_caller)]
Rights = Annotated[CallerRights, Depends(rights_of_caller)]
RequiredSecurity = Annotated[Security, Depends(required_security)]
TopicName = Annotated[str, Path(examples=["flights"])]
PartitionId = Annotated[str, Path(examples=["0"], description="number, from 0")]

# -- tidelog's own lists


class Listing(BaseModel, Generic[Item]):
    """A page of a list. Lists of the v3 dialect have these and other fields."""

    metadata: ListMetadata
    data: list[Item]


async def empty_listing(request: Request) -> Listing[BaseModel]:
    """Return a list without data for the request's path.

    Its URL is one that this client can reach.
    """
    url = client_url(request.scope, request.app.state.settings.advertised_url).url
    return Listing(metadata=ListMetadata(self_url=f"{url}{request.url.path}"), data=[])


EmptyListing = Annotated[Listing[BaseModel], Depends(empty_listing)]


async def keys_of_topics(
    broker: Broker,
    start_key: tuple[str, Any] | None,
    keys_of: Callable[[Topic], Iterable[T] | None],
) -> Iterator[tuple[str, T | None]]:
    """Return sorted pairs (topic name, key of an item of the topic) for `answer_page`.

    Only the pairs after `after` are returned. `keys_of` returns the sorted keys of a topic's items,
    or None if the caller may not see these items. For such a topic, there is one pair with the key
    None, which the page omits. After this pair, `answer_page` may let the event loop run other
    callbacks, so many such topics do not block the loop.
    """
    names = await in_order(broker.state.topics)

    def found() -> Iterator[tuple[str, T | None]]:
        for name in names:
            topic = broker.state.topics.get(name)
            if topic is None or (start_key is not None and name < start_key[0]):
                continue
            keys = keys_of(topic)
            if keys is None:
                yield name, None
                continue
            for key in keys:
                if start_key is None or (name, key) > start_key:
                    yield name, key

    return found()


# -- the v3 dialect


async def resource_factory(request: Request) -> ResourceFactory:
    """Return a factory of resources with URLs that this client can reach."""
    path = request.url.path
    mount = next(mount for mount in V3.mounts if path.startswith(f"{mount}/"))
    cluster_id = broker_of(request).identity.cluster_id
    url = client_url(request.scope, request.app.state.settings.advertised_url)
    return ResourceFactory(url, mount, cluster_id)


Resources = Annotated[ResourceFactory, Depends(resource_factory)]


async def check_cluster_id(cluster_id: str, make: Resources) -> None:
    """Raise NoSuchResource if the id is not the id of the broker's cluster."""
    check_cluster(cluster_id, make.cluster_id)


def check_cluster(requested: str, cluster_id: str) -> None:
    if requested != cluster_id:
        raise NoSuchResource(f"Cluster {requested} cannot be found.")


class TopicContext(NamedTuple):
    """A topic that exists, in a state that is fresh for this request."""

    broker: Broker
    topic: Topic
    make: ResourceFactory


@contextlib.contextmanager
def hosted_topic() -> Iterator[None]:
    """Raise TopicNotHosted for UnknownTopic."""
    try:
        yield
    except UnknownTopic as error:
        raise TopicNotHosted(error.topic) from error


async def topic_of_path(
    topic_name: TopicName, broker: FreshBroker, make: Resources
) -> TopicContext:
    """Return the topic of the path. Raises TopicNotHosted."""
    topic = broker.state.topics.get(topic_name)
    if topic is None:
        raise TopicNotHosted(topic_name)
    return TopicContext(broker, topic, make)


PathTopic = Annotated[TopicContext, Depends(topic_of_path)]
WithOperations = Annotated[
    bool, Query(description="also return what the caller may do (`authorized_operations`)")
]

# -- changes of the cluster


class TopicCreation(StrictModel):
    """Fields of a new topic in each dialect."""

    topic_name: str
    partitions_count: WholeNumber | None = Field(
        default=None, description="-1 or null: the default"
    )
    replication_factor: WholeNumber | None = Field(
        default=None, description="accepted and ignored: the object store replicates"
    )


def partitions_wanted(body: TopicCreation) -> int | None:
    """Return the number of partitions that a request gives, None for the default."""
    return None if body.partitions_count == -1 else body.partitions_count


def config_text(value: str | int | float | bool) -> str:
    """Return a config's value as Kafka's text. Clients also send JSON numbers and booleans."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)
