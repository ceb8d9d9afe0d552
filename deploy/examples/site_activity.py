"""Site activity: page views from the access log of a web server, and their count in each minute.

Shows: a producer with keys (the views of a user keep their order), and SQL on the topic's table,
without a broker. Needs `pip install duckdb`. With `tidelog serve` in another terminal:

    tidelog topics create page-views --partitions 3
    tail -n 1000 /var/log/nginx/access.log | python deploy/examples/site_activity.py produce
    tidelog seal page-views                 # now; else brokers do it at segment.bytes or segment.ms
    python deploy/examples/site_activity.py count --store ./tidelog-data
"""

import argparse
import collections
import concurrent.futures
import datetime as dt
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from tidelog.client import ClientError, Delivered, Producer

TOPIC = "page-views"
LINE = re.compile(r'(?P<host>\S+) \S+ (?P<user>\S+) \[(?P<time>[^]]+)\] "[A-Z]+ (?P<page>[^ ?"]+)')
COUNTS = """
    SELECT time_bucket(INTERVAL 1 minute, timestamp) AS minute, decode(value) AS page,
           count(*) AS views, count(DISTINCT key) AS users
    FROM read_parquet($files) GROUP BY ALL ORDER BY minute, views DESC, page"""


def produce(servers: str, lines: Iterable[str]) -> None:
    """Send a record for each line: the user is the key, the page the value, with its time.

    A line that is no request is named on stderr and left out.
    """
    waiting: collections.deque[concurrent.futures.Future[Delivered]] = collections.deque()
    with Producer(servers) as producer:
        for number, line in enumerate(lines, 1):
            try:
                match = LINE.match(line)
                if match is None:
                    raise ValueError("not in the common log format")
                time = dt.datetime.strptime(match["time"], "%d/%b/%Y:%H:%M:%S %z")
            except ValueError as error:
                print(f"line {number} is left out: {error}", file=sys.stderr)
                continue
            user = match["host"] if match["user"] == "-" else match["user"]
            time_ms = int(time.timestamp() * 1000)
            waiting.append(producer.send(TOPIC, match["page"], key=user, timestamp_ms=time_ms))
            while waiting and waiting[0].done():
                waiting.popleft().result()  # raises the error of a record that was not stored
        producer.flush()
    for sent in waiting:
        sent.result()


def count(store: Path) -> None:
    """Print minute, page, views and users. The table has the records that are sealed."""
    import deltalake
    import duckdb

    tables = list(store.glob(f"topics/{TOPIC}-{'[0-9a-f]' * 32}"))
    if len(tables) != 1:
        sys.exit(f"{store} has {len(tables)} tables of topic {TOPIC}, not one: produce and seal")
    files = deltalake.DeltaTable(tables[0]).file_uris()
    with duckdb.connect() as session:
        session.execute("SET TimeZone = 'UTC'")
        for minute, page, views, users in session.execute(COUNTS, {"files": files}).fetchall():
            print(f"{minute:%Y-%m-%d %H:%M}\t{page}\t{views}\t{users}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=["produce", "count"])
    parser.add_argument("--server", default="localhost:8082")
    parser.add_argument("--store", type=Path, default=Path("tidelog-data"))
    options = parser.parse_args()
    try:
        if options.command == "produce":
            produce(options.server, sys.stdin)
        else:
            count(options.store)
    except KeyboardInterrupt:
        sys.exit(130)
    except ClientError as error:
        sys.exit(f"site_activity: {error}")
