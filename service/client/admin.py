"""AsyncAdmin: topics, groups, brokers, ACLs.

Results are the JSON of the v3 routes (service/docs/API.md), with the items of all pages.
"""

from collections.abc import Mapping
from typing import Any

from tidelog.service.client.connection import Connected, Connection, quoted


class AsyncAdmin(Connected):
    """Requests that describe and change a cluster. Belongs to one event loop.

    Reads are repeated for `retry_s`. Changes are sent once, because a repetition could fail after
    the first request has succeeded; only a change that no broker got goes to the next broker.
    Raises ClientError.
    """

    def __init__(
        self,
        servers: str | Connection,
        *,
        key: str | None = None,
        ca_file: str | None = None,
        retry_s: float = 30.0,
    ) -> None:
        super().__init__(servers, key=key, ca_file=ca_file, retry_s=retry_s)

    async def __aenter__(self) -> "AsyncAdmin":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._disconnect()

    # -- topics

    async def topics(self) -> list[dict[str, Any]]:
        """List the topics that the caller may describe."""
        return await self._list("/topics")

    async def topic(self, name: str) -> dict[str, Any]:
        """Return a topic with its number of partitions."""
        return await self._get(f"/topics/{quoted(name)}")

    async def create_topic(
        self, name: str, partitions: int | None = None, configs: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Create a topic. Without `partitions`, the broker chooses their number."""
        body = {
            "topic_name": name,
            "partitions_count": partitions,
            "configs": [{"name": key, "value": value} for key, value in (configs or {}).items()],
        }
        return await self._change("POST", "/topics", body)

    async def delete_topic(self, name: str) -> None:
        """Delete a topic with all its records."""
        await self._change("DELETE", f"/topics/{quoted(name)}")

    async def add_partitions(self, name: str, total: int) -> dict[str, Any]:
        """Raise the number of partitions to `total`."""
        return await self._change("PATCH", f"/topics/{quoted(name)}", {"partitions_count": total})

    async def configs(self, name: str) -> dict[str, str]:
        """Return every config of a topic, with the topic's value or the default."""
        listed = await self._list(f"/topics/{quoted(name)}/configs")
        return {config["name"]: config["value"] for config in listed}

    async def alter_configs(self, name: str, configs: Mapping[str, str | None]) -> None:
        """Set configs of a topic, all or none. The value None returns a config to its default."""
        path = f"/topics/{quoted(name)}/configs:alter"
        await self._change("POST", path, config_changes(configs))

    async def offsets(self, name: str) -> dict[int, tuple[int, int]]:
        """Return the log start offset and the end offset of each partition."""
        count = await self.connection.partitions(name)
        return {number: await self.connection.ends(name, number) for number in range(count)}

    # -- groups

    async def groups(self) -> list[dict[str, Any]]:
        """List the groups that have members or committed offsets."""
        return await self._list("/consumer-groups")

    async def group(self, group: str) -> dict[str, Any]:
        """Return a group, with its members as `consumers`."""
        path = f"/consumer-groups/{quoted(group)}"
        return {**await self._get(path), "consumers": await self._list(f"{path}/consumers")}

    async def group_offsets(self, group: str) -> list[dict[str, Any]]:
        """Return the committed offsets of a group."""
        return await self._list(f"/consumer-groups/{quoted(group)}/offsets")

    async def lag(self, group: str) -> list[dict[str, Any]]:
        """Return the lag of a group in each partition."""
        return await self._list(f"/consumer-groups/{quoted(group)}/lags")

    async def reset_group(self, group: str, **to: Any) -> list[dict[str, Any]]:
        """Set the position of a group without members.

        `to` is the body of `offsets:reset` (service/docs/API.md): `to` is EARLIEST, LATEST, OFFSET
        (with `offset`), TIMESTAMP (with `timestamp`) or DURATION (with `duration_ms`);
        `topic_name`, `partition_ids`, `validate_only`. Return the new offsets.
        """
        path = f"/consumer-groups/{quoted(group)}/offsets:reset"
        offsets: list[dict[str, Any]] = (await self._change("POST", path, to))["data"]
        return offsets

    async def delete_group(self, group: str) -> None:
        """Delete a group without members, and its committed offsets."""
        await self._change("DELETE", f"/consumer-groups/{quoted(group)}")

    # -- brokers, ACLs

    async def brokers(self) -> list[dict[str, Any]]:
        """List the live brokers. The broker that answers always has id 1."""
        return await self._list("/brokers")

    async def acls(self, **filters: str) -> list[dict[str, Any]]:
        """List the ACLs that match a filter (`resource_type`, `principal` and so on)."""
        return await self._list("/acls", filters)

    async def create_acl(self, **acl: str) -> None:
        """Create an ACL from all of its fields.

        They are `resource_type`, `resource_name`, `pattern_type`, `principal`, `host`, `operation`
        and `permission`.
        """
        await self._change("POST", "/acls", acl)

    async def delete_acls(self, **filters: str) -> list[dict[str, Any]]:
        """Delete the ACLs that match a filter, and return them."""
        cluster = await self.connection.cluster()
        answer = await self.connection.call(
            "DELETE", f"{cluster}/acls", params=filters, retry_s=0.0
        )
        acls: list[dict[str, Any]] = self.connection.json_of(answer)["data"]
        return acls

    # -- requests

    async def _get(self, path: str) -> dict[str, Any]:
        answer_body: dict[str, Any] = await self.connection.get_json(
            f"{await self.connection.cluster()}{path}"
        )
        return answer_body

    async def _list(
        self, path: str, params: Mapping[str, str] | None = None
    ) -> list[dict[str, Any]]:
        path = f"{await self.connection.cluster()}{path}"
        items: list[dict[str, Any]] = (await self.connection.get_json(path, params=params))["data"]
        return items

    async def _change(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        cluster = await self.connection.cluster()
        answer = await self.connection.call(method, f"{cluster}{path}", json=body, retry_s=0.0)
        answer_body: dict[str, Any] = self.connection.json_of(answer) if answer.content else {}
        return answer_body


def config_changes(configs: Mapping[str, str | None]) -> dict[str, Any]:
    """Return the body of a request that changes configs. None stands for the default."""
    data = [
        {"name": name, "operation": "DELETE"}
        if value is None
        else {"name": name, "value": value, "operation": "SET"}
        for name, value in configs.items()
    ]
    return {"data": data}
