"""Consumer instances over HTTP, as tests use them."""

import json
from typing import Any

import httpx

from tests.service.conftest import V2, Broker
from tests.service.conftest import post as produce

STRIMZI = {"enable.auto.commit": False, "auto.offset.reset": "earliest", "format": "json"}


class Instance:
    def __init__(self, http: httpx.AsyncClient, path: str) -> None:
        self.http = http
        self.path = path

    async def __call__(
        self, method: str, what: str = "", body: Any = None, **headers: str
    ) -> httpx.Response:
        content = None if body is None else json.dumps(body)
        sent = {"content-type": V2} if body is not None else {}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.http.request(method, f"{self.path}{what}", content=content, headers=sent)

    async def ok(self, method: str, what: str = "", body: Any = None) -> Any:
        answer = await self(method, what, body)
        assert answer.status_code in (200, 204), answer.text
        return answer.json() if answer.content else None

    async def read(self, **query: Any) -> list[Any]:
        text = "&".join(f"{name}={value}" for name, value in query.items())
        return [record["value"] for record in await self.ok("GET", f"/records?{text}")]

    async def committed(self) -> dict[int, int]:
        said = await self.ok("GET", "/offsets")
        return {row["partition"]: row["offset"] for row in said["offsets"]}


async def created(broker: Broker, group: str = "g", **body: Any) -> Instance:
    said = {"format": "json", "auto.offset.reset": "earliest"} | {
        name.replace("_", "."): value for name, value in body.items()
    }
    answer = await broker.http.post(
        f"/consumers/{group}", content=json.dumps(said), headers={"content-type": V2}
    )
    assert answer.status_code == 200, answer.text
    name = answer.json()["instance_id"]
    return Instance(broker.http, f"/consumers/{group}/instances/{name}")


async def subscribed(broker: Broker, group: str = "g", **body: Any) -> Instance:
    instance = await created(broker, group, **body)
    await instance.ok("POST", "/subscription", {"topics": ["t"]})
    return instance


async def put(broker: Broker, *values: Any, partition: int = 0) -> None:
    records = [{"value": value, "partition": partition} for value in values]
    assert (await produce(broker.http, records)).status_code == 200
