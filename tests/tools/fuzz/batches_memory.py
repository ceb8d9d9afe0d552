"""The memory of a process that checks many changed batches.

`python -m tests.tools.fuzz.batches_memory COUNT` prints the MiB after a tenth of them and at last.
The outcomes of a thousand batches at a time are kept, as by a large Produce request.
"""

import os
import random
import sys
from collections import deque

from tests.storage.codec.golden import GOLDEN
from tests.storage.codec.reference import with_header
from tests.tools.attack.probes import resident_mib
from tests.tools.attack.produce_attacks import many_headers, members, runs, zeros
from tests.tools.fuzz.mutations import mutated
from tidelog.storage.codec import decompression, record_batch
from tidelog.storage.codec.batch_header import HEADER_SIZE
from tidelog.storage.core.errors import LogError

OUTCOMES = 1_000
HEAVY_EVERY = 200


def main(count: int) -> None:
    rng = random.Random(11)
    usual = [bytes.fromhex(text) for text in GOLDEN.values()]
    heavy = [runs(), many_headers(0, decompression.ZSTD), members(1 << 16), zeros("lz4", 10 << 20)]
    outcomes = deque[object](maxlen=OUTCOMES)
    errors, sizes = 0, list[int]()
    for number in range(count):
        seed = rng.choice(usual if number % HEAVY_EVERY else heavy)
        records = seed[HEADER_SIZE:]
        if seed in usual or rng.random() < 0.5:
            records = mutated([records], rng)
        outcome = record_batch.check(memoryview(with_header(seed[:HEADER_SIZE] + records)))
        errors += isinstance(outcome, LogError)
        outcomes.append(outcome)
        if number + 1 in (count // 10, count):
            sizes.append(resident_mib(os.getpid()))
    assert 0 < errors < count
    print(*sizes)


if __name__ == "__main__":
    main(int(sys.argv[1]))
