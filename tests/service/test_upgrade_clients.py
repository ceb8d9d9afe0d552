"""Clients that offer HTTP/2 with each request, and both listeners of a broker."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from tests.service.conftest import JSON, QUIET, V2, Broker, ends, send, stored
from tests.service.instances import created
from tidelog.service.peers.client import ANNOUNCE, METRICS
from tidelog.service.peers.listener import PeerApp, PeerListener
from tidelog.storage.broker import Broker as LogBroker
from tidelog.storage.runtime.clock import SystemClock
from tidelog.storage.store.folder import FolderStore

pytestmark = pytest.mark.broker(topics={"t": 1})

CLIENT_S = 60.0
OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n"

JAVA_CLIENT = """
import java.net.URI;
import java.net.http.*;

class Offering {
    static final HttpClient client = HttpClient.newHttpClient();

    static String ask(String method, String url, String type, String body) throws Exception {
        var publisher = HttpRequest.BodyPublishers.ofString(body);
        var request = HttpRequest.newBuilder(URI.create(url)).method(method, publisher)
            .header("Content-Type", type)
            .header("Accept", method.equals("GET") ? type : "application/vnd.kafka.v2+json")
            .build();
        var answer = client.send(request, HttpResponse.BodyHandlers.ofString());
        System.out.println(answer.statusCode());
        return answer.body();
    }

    public static void main(String[] arguments) throws Exception {
        String url = arguments[0], v2 = "application/vnd.kafka.v2+json",
            json = "application/vnd.kafka.json.v2+json",
            instance = url + "/consumers/java/instances/i";
        ask("POST", url + "/topics/t", json,
            "{\\"records\\":[{\\"value\\":1,\\"partition\\":0},{\\"value\\":2,\\"partition\\":0}]}");
        ask("POST", url + "/consumers/java", v2, "{\\"name\\":\\"i\\",\\"format\\":\\"json\\","
            + "\\"auto.offset.reset\\":\\"earliest\\",\\"auto.commit.enable\\":\\"false\\"}");
        ask("POST", instance + "/subscription", v2, "{\\"topics\\":[\\"t\\"]}");
        System.out.println(ask("GET", instance + "/records", json, ""));
        ask("POST", instance + "/offsets", v2,
            "{\\"offsets\\":[{\\"topic\\":\\"t\\",\\"partition\\":0,\\"offset\\":0}]}");
        System.out.println(ask("GET", instance + "/offsets", v2,
            "{\\"partitions\\":[{\\"topic\\":\\"t\\",\\"partition\\":0}]}"));
        ask("DELETE", instance, v2, "");
    }
}
"""


async def run(*command: str) -> str:
    """The output of a client; a client that does not end is killed."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    try:
        async with asyncio.timeout(CLIENT_S):
            said, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, errors.decode()
    return said.decode()


async def exchange(port: int, *packets: bytes, statuses: int) -> list[int]:
    """Send packets with pauses; the statuses of the answers, once there are so many or no more."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for packet in packets:
        writer.write(packet)
        await writer.drain()
        await asyncio.sleep(0.05)
    codes = []
    async with asyncio.timeout(10):
        while len(codes) < statuses and (line := await reader.readline()):
            codes.append(int(line.split()[1]))
            length = 0
            while (field := await reader.readline()).strip():
                name, _, value = field.lower().partition(b":")
                length = int(value) if name == b"content-length" else length
            await reader.readexactly(length)
    writer.close()
    await writer.wait_closed()
    return codes


def post(path: str, body: bytes, offer: bytes = OFFER, media_type: str = JSON) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: {media_type}\r\n".encode()
    return head + offer + b"Content-Length: %d\r\n\r\n" % len(body) + body


@pytest.mark.skipif(shutil.which("javac") is None, reason="needs a JDK: javac is not on the PATH")
async def test_javas_client_as_it_comes_works(broker: Broker, port: int, tmp_path: Path) -> None:
    source = tmp_path / "Offering.java"
    source.write_text(JAVA_CLIENT)
    flags = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
    said = await run("java", *flags, str(source), f"http://127.0.0.1:{port}")
    *statuses, last = [line for line in said.splitlines() if line.isdigit()]
    assert statuses == ["200", "200", "204", "200", "200", "200"]
    assert last == "204"
    records, committed = [json.loads(line) for line in said.splitlines() if not line.isdigit()]
    assert [record["value"] for record in records] == [1, 2]
    assert [row["offset"] for row in committed["offsets"]] == [1], "the record after it"


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl: it is not on the PATH")
async def test_curl_that_offers_http2_works(broker: Broker, port: int) -> None:
    body = '{"records":[{"value":1}]}'
    url, header = f"http://127.0.0.1:{port}/topics/t", f"Content-Type: {JSON}"
    said = await run("curl", "-sS", "--http2", "--noproxy", "*", url, "-H", header, "-d", body)
    assert [row["offset"] for row in json.loads(said)["offsets"]] == [0]


@pytest.mark.parametrize(
    "offer", [OFFER, b"Upgrade: websocket\r\nConnection: Upgrade\r\n"], ids=["h2c", "websocket"]
)
@pytest.mark.parametrize("is_apart", [False, True])
async def test_record_arrives(broker: Broker, port: int, offer: bytes, is_apart: bool) -> None:
    packet = post("/topics/t", b'{"records":[{"value":"there"}]}', offer)
    head, _, body = packet.partition(b"\r\n\r\n")
    packets = [head + b"\r\n\r\n", body] if is_apart else [packet]
    assert await exchange(port, *packets, statuses=1) == [200]
    assert [row["value"] for row in await stored(broker.log)] == [b'"there"']


async def test_body_is_not_run_as_request(broker: Broker, port: int) -> None:
    inner = post("/topics/t", b'{"records":[{"value":"inner"}]}', b"")
    head, body = post("/topics/t", inner)[: -len(inner)], inner
    after = b"GET /topics/t HTTP/1.1\r\nHost: x\r\n\r\n"
    assert await exchange(port, head, body, after, statuses=2) == [400, 200]
    assert ends(broker.log) == [0]


async def test_commit_commits_what_its_body_names(broker: Broker, port: int) -> None:
    for number in range(5):
        assert (
            await send(broker.http, b'{"records":[{"value":%d}]}' % number, JSON)
        ).status_code == 200
    instance = await created(broker, auto_commit_enable=False)
    await instance.ok("POST", "/subscription", {"topics": ["t"]})
    assert await instance.read() == [0, 1, 2, 3, 4]
    body = b'{"offsets":[{"topic":"t","partition":0,"offset":1}]}'
    packet = post(f"{instance.path}/offsets", body, media_type=V2)
    assert await exchange(port, packet, statuses=1) == [200]
    assert await instance.committed() == {0: 2}


async def test_port_for_brokers_reads_bodies_too(tmp_path: Path) -> None:
    log = await LogBroker.open(FolderStore(tmp_path), QUIET, clock=SystemClock(), name="a")
    asked = []
    reports = {METRICS: lambda: asked.append(METRICS) or b"inner"}
    listener = PeerListener(PeerApp(log, reports=reports), "127.0.0.1", 0)
    try:
        port = int((await listener.start("")).rpartition(":")[2])
        shown = f"Authorization: Bearer {log._membership.me.token}\r\n".encode()
        inner = post(METRICS, b"", shown)
        head = post(ANNOUNCE, inner, shown + OFFER)[: -len(inner)]
        after = post(METRICS, b"", shown + OFFER)
        assert await exchange(port, head, inner, statuses=1) == [400], "no message of a peer"
        assert await exchange(port, head + inner, after, statuses=2) == [400, 200]
        assert asked == [METRICS], "the one behind the body"
    finally:
        await log.close()
        await listener.close()
        await log._log.store.close()
