"""Job queue: workers of a group count the lines of files; a job that fails three times is given up.

Shows: a retry topic, so that a failed job does not delay the others, and a dead-letter topic for
jobs that failed three times. The header `attempts` has the number of failures. Results, failures
and offsets are one Transaction: a job that a crash interrupts is done again, and has one result.
With `tidelog serve` in another terminal:

    for topic in jobs jobs.retry-1 jobs.done jobs.dead; do tidelog topics create $topic; done
    echo README.md | tidelog produce jobs                       # a job is the path of a file
    python deploy/examples/job_queue.py jobs                    # as many workers as partitions
    python deploy/examples/job_queue.py jobs.retry-1 --delay-s 30      # in another terminal
    tidelog consume jobs.dead                                   # after a repair, produce to jobs
"""

import argparse
import sys
import time
from pathlib import Path

from tidelog.client import ClientError, Consumer, Producer, Record, Refused, Transaction

ATTEMPTS_MAX = 3


def result_of(job: bytes | None) -> str:
    """The job itself: count the lines of a file. Raises OSError or ValueError."""
    if not job:
        raise ValueError("the job names no file")
    path = Path(job.decode())
    with path.open("rb") as file:
        return f"{path}: {sum(1 for _ in file)} lines"


def finish(record: Record, transaction: Transaction) -> None:
    """Do the job, and send its result or, after an error, the job itself to the next topic."""
    try:
        transaction.send("jobs.done", result_of(record.value), key=record.key)
    except (OSError, ValueError) as error:
        headers = {header.key: header.value or b"" for header in record.headers}
        before = headers.get("attempts", b"")
        attempts = 1 + (int(before) if before.isdigit() else 0)
        headers |= {"attempts": str(attempts).encode(), "error": str(error).encode()}
        topic = "jobs.retry-1" if attempts < ATTEMPTS_MAX else "jobs.dead"
        transaction.send(topic, record.value, key=record.key, headers=headers.items())
        print(f"{record.value!r} failed, attempt {attempts}, to {topic}: {error}", file=sys.stderr)


def work(servers: str, topic: str, delay_s: float) -> None:
    """Do jobs as a member of the topic's group.

    A job begins `delay_s` after its record was sent, at the earliest. Raises Refused (409) if the
    partitions have gone to another member.
    """
    with (
        Producer(servers) as producer,
        Consumer(
            servers, topic, f"{topic}-workers", auto_commit=False, fetch_bytes=65536
        ) as consumer,
    ):
        while True:
            records = consumer.poll(10.0)
            with producer.transaction() as transaction:
                for record in records:
                    # All jobs of a topic wait equally long, so the first one is due first.
                    due_s = (record.timestamp_ms or 0) / 1000 + delay_s
                    time.sleep(max(0.0, due_s - time.time()))
                    finish(record, transaction)
                transaction.commit_positions(consumer)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("topic", choices=["jobs", "jobs.retry-1"])
    parser.add_argument("--delay-s", type=float, default=0.0)
    parser.add_argument("--server", default="localhost:8082")
    options = parser.parse_args()
    while True:
        try:
            work(options.server, options.topic, options.delay_s)
        except KeyboardInterrupt:
            sys.exit(130)
        except Refused as error:
            if error.status != 409:
                sys.exit(f"job_queue: {error}")
            # Another member has our partitions. As a new member, begin at the committed offsets.
            print(f"job_queue: joining again: {error}", file=sys.stderr)
        except ClientError as error:
            sys.exit(f"job_queue: {error}")
