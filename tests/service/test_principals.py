"""Each commit names the authenticated client that requested it (FORMAT 3), and no other."""

import asyncio
import contextvars
from collections.abc import Awaitable

import pytest

from tests.service.conftest import Broker
from tests.service.keyed import ADMIN, JSON_TYPE, RECORDS, SETTINGS, allow, key_of
from tests.support.records import entries_of
from tidelog.storage.codec.entry import Commit
from tidelog.storage.core.actions import Append, CommitOffsets, CreateTopic, GroupOffset
from tidelog.storage.groups.offset_commits import _portions, _WaitingCommit
from tidelog.storage.runtime.request_context import PRINCIPAL

pytestmark = pytest.mark.broker(topics={"t": 1}, **SETTINGS)


async def apart(work: Awaitable[object]) -> object:
    """As a server does: a task for each request."""

    async def run() -> object:
        return await work

    return await asyncio.create_task(run(), context=contextvars.copy_context())


async def commits_of(broker: Broker) -> list[Commit]:
    entries = await entries_of(broker.log._log.store)
    return [commit for _, decoded in entries for commit in decoded.entry.commits]


def appends_by_principal(commits: list[Commit]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for commit in commits:
        rows = sum(action.count for action in commit.actions if isinstance(action, Append))
        if rows:
            counts[commit.principal] = counts.get(commit.principal, 0) + rows
    return counts


async def test_requests_of_two_principals_at_once_share_no_commit(broker: Broker) -> None:
    alice, bob = [await key_of(broker.log, f"User:{name}") for name in ("alice", "bob")]
    for name in ("alice", "bob"):
        await allow(broker.log, f"User:{name}", "WRITE")
    posts = [
        broker.http.post("/topics/t", content=RECORDS, headers=JSON_TYPE | who)
        for who in [alice, alice, bob, bob, alice, ADMIN]
    ]
    answers = await asyncio.gather(*map(apart, posts))
    assert {answer.status_code for answer in answers} == {200}
    appends = appends_by_principal(await commits_of(broker))
    assert appends["User:alice"] == 3 * appends["User:admin"]
    assert appends["User:bob"] == 2 * appends["User:admin"]
    assert set(appends) == {"User:alice", "User:bob", "User:admin"}


async def test_changes_of_topics_name_their_principal_and_those_of_brokers_none(
    broker: Broker,
) -> None:
    path = f"{broker.v3}/topics"
    made = broker.http.post(path, json={"topic_name": "new"}, headers=ADMIN)
    assert (await apart(made)).status_code == 201
    await broker.log.topics.create("own", 1, {})
    creators = {
        action.name: commit.principal
        for commit in await commits_of(broker)
        for action in commit.actions
        if isinstance(action, CreateTopic)
    }
    assert creators == {"t": "", "new": "User:admin", "own": ""}


def test_offsets_of_two_principals_share_no_commit() -> None:
    loop = asyncio.new_event_loop()
    action = CommitOffsets("g", -1, [GroupOffset("a" * 32, 0, 1)])
    waiting = [_WaitingCommit(action, name, loop.create_future()) for name in "aabba"]
    principals = [[commit.principal for commit in portion] for portion in _portions(waiting)]
    loop.close()
    assert principals == [["a", "a"], ["b", "b"], ["a"]]


def test_without_authentication_it_is_empty() -> None:
    assert contextvars.Context().run(PRINCIPAL.get) == ""
