"""`tidelog topics skew`: the keys with the largest shares of a topic, from a sample of its newest
records, and the share of the hottest partition if these keys had salts.

A salt is a suffix that a producer adds to a hot key: with N salts, the records of the key go to the
partitions of N keys in turn. In a sample of S records, a key's share has a standard error of at
most 1 / (2 sqrt(S)): 0.5 % for the default of 10,000.
"""

import base64
import math
from collections import Counter
from typing import Any, NamedTuple

from tidelog.service.cli.client import CommandConnection
from tidelog.service.cli.requests import quoted
from tidelog.storage.codec.murmur2 import partition_of
from tidelog.storage.runtime.tasks import together

READS_AT_ONCE = 8
RECORDS_A_READ = 5_000
Sample = Counter[tuple[bytes | None, int]]
"""Sampled records by key and partition."""


class Skew(NamedTuple):
    """The result. Shares are parts of the sampled records. `salted_share` is the share of the
    hottest partition if the shown keys had salts."""

    sampled: int
    keys: int
    hottest: int
    share: float
    average: float
    salted_share: float
    top: list[tuple[bytes | None, int, float, int]]
    """(key, partition with most of its records, share, partitions)"""


async def sampled(client: CommandConnection, topic: str, size: int) -> tuple[Sample, int]:
    """Return a sample of about `size` of the newest records, and the number of partitions. Each
    partition has the same share of the sample as of the topic's records."""
    path = f"/topics/{quoted(topic)}/partitions"
    count = await client.partitions(topic)

    finding = (client.ends(topic, number) for number in range(count))
    ranges = await together(*finding, at_once=READS_AT_ONCE)
    total = sum(end - start for start, end in ranges)
    sample: Sample = Counter()

    async def read(number: int) -> None:
        start, end = ranges[number]
        wanted = math.ceil(size * (end - start) / max(total, 1))
        offset = max(start, end - wanted)
        while offset < end:
            answer = await client.get(
                f"{path}/{number}/records",
                params={"offset": offset, "timeout": 0, "max_records": RECORDS_A_READ},
                headers={"accept": "application/vnd.kafka.binary.v2+json"},
            )
            records: list[dict[str, Any]] = client.json_of(answer)
            for record in records:
                if record["offset"] < end:
                    key = record["key"]
                    sample[None if key is None else base64.b64decode(key), number] += 1
            if not records:
                return
            offset = records[-1]["offset"] + 1

    await together(*map(read, range(count)), at_once=READS_AT_ONCE)
    return sample, count


def skew_of(sample: Sample, partitions: int, *, top: int, salts: int) -> Skew | None:
    """Return the skew of a sample, None if the sample is empty. The `top` keys get the salts."""
    total = sum(sample.values())
    if not total:
        return None
    by_key: Counter[bytes | None] = Counter()
    by_partition: Counter[int] = Counter()
    places: dict[bytes | None, Counter[int]] = {}
    for (key, number), count in sample.items():
        by_key[key] += count
        by_partition[number] += count
        places.setdefault(key, Counter())[number] += count
    keys = [(key, count) for key, count in by_key.most_common() if key is not None][:top]
    spread = {number: float(count) for number, count in by_partition.items()}
    for key, count in keys:
        for number, records in places[key].items():
            spread[number] -= records
        for salt in range(salts):
            number = partition_of(b"%s-%d" % (key, salt), partitions)
            spread[number] = spread.get(number, 0.0) + count / salts
    hottest, most = by_partition.most_common(1)[0]
    return Skew(
        sampled=total,
        keys=sum(key is not None for key in by_key),
        hottest=hottest,
        share=most / total,
        average=1 / partitions,
        salted_share=max(spread.values()) / total,
        top=[
            (key, places[key].most_common(1)[0][0], count / total, len(places[key]))
            for key, count in keys
        ],
    )
