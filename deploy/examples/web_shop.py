"""Web shop: orders in a database reach a topic exactly once, and each gets exactly one invoice.

Shows: an outbox (`order` writes order and message in one transaction of sqlite; `relay` sends the
messages with an Idempotency-Key made of their ids) and a Transaction (`invoice` writes invoices
and its offsets in one commit). Kill any of them at any moment, and run it again. With
`tidelog serve` in another terminal:

    tidelog topics create orders --partitions 3 && tidelog topics create invoices --partitions 3
    python deploy/examples/web_shop.py order alice 3 tea
    python deploy/examples/web_shop.py relay        # sends what is in the outbox, then ends
    python deploy/examples/web_shop.py invoice      # until Ctrl-C

Brokers keep an Idempotency-Key for an hour. So `relay` does not repeat a batch that is older.
"""

import argparse
import json
import sqlite3
import sys
import time
import uuid

from tidelog.client import ClientError, Consumer, Producer, Refused

REPEAT_S = 3000
"""How long a batch is repeated: less than the hour, with a margin for different clocks."""
TABLES = """
    CREATE TABLE IF NOT EXISTS orders (id TEXT PRIMARY KEY, customer TEXT, pieces INT, item TEXT);
    CREATE TABLE IF NOT EXISTS outbox (
        number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT, customer TEXT, value TEXT,
        batch TEXT, tried_s REAL);"""
NEW_BATCH = """
    UPDATE outbox SET batch = ?, tried_s = ?
    WHERE number IN (SELECT number FROM outbox ORDER BY number LIMIT 1000)"""


def order(shop: sqlite3.Connection, customer: str, pieces: int, item: str) -> None:
    """Write an order and its message: both, or after a crash neither."""
    order_id = uuid.uuid4().hex
    value = json.dumps({"order": order_id, "customer": customer, "pieces": pieces, "item": item})
    with shop:
        shop.execute("INSERT INTO orders VALUES (?, ?, ?, ?)", (order_id, customer, pieces, item))
        shop.execute(
            "INSERT INTO outbox (id, customer, value) VALUES (?, ?, ?)", (order_id, customer, value)
        )


def next_batch(shop: sqlite3.Connection) -> str | None:
    """Return the name of the batch to send, which is the id of its first message.

    It is the batch that was under way before a crash, else a new one. A batch is stored before it
    is sent, so a repetition has the same messages.
    """
    with shop:
        shop.execute("BEGIN IMMEDIATE")
        row = shop.execute("SELECT id, batch, tried_s FROM outbox ORDER BY number").fetchone()
        if row is None:
            return None
        message_id, batch, tried_s = row
        if batch is None:
            shop.execute(NEW_BATCH, (message_id, time.time()))
        elif time.time() - tried_s > REPEAT_S:
            sys.exit(
                f"web_shop: batch {batch} is too old to be sent again: look for order {message_id} "
                "in the topic. If it is there, delete the batch from outbox; else set batch to NULL"
            )
    return message_id  # also of an older batch: messages leave the outbox only with their batch


def relay(shop: sqlite3.Connection, servers: str) -> None:
    """Send each batch of the outbox.

    A batch that is sent again has the key of the first time, so the broker returns its first answer
    and stores nothing.
    """
    with Producer(servers) as producer:
        while batch := next_batch(shop):
            rows = "SELECT customer, value FROM outbox WHERE batch = ? ORDER BY number"
            with producer.transaction(f"outbox-{batch}") as transaction:
                for customer, value in shop.execute(rows, (batch,)).fetchall():
                    transaction.send("orders", value, key=customer)
            with shop:  # a crash before this: the batch is sent again
                shop.execute("DELETE FROM outbox WHERE batch = ?", (batch,))


def invoice(servers: str) -> None:
    """Write an invoice for each order. Other processes may do the same in the same group."""
    with Producer(servers) as producer:
        while True:
            # If a commit is refused, join as a new member, which begins at the committed offsets.
            try:
                with Consumer(
                    servers, "orders", "invoices", decode_value=json.loads, auto_commit=False
                ) as consumer:
                    while True:
                        records = consumer.poll(10.0)
                        with producer.transaction() as transaction:
                            for record in records:
                                text = "{order}: {pieces} x {item}".format(**record.value)
                                transaction.send("invoices", text, key=record.key)
                            transaction.commit_positions(consumer)
            except Refused as error:
                if error.status != 409:
                    raise
                print(f"web_shop: the group has a new generation: {error}", file=sys.stderr)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--server", default="localhost:8082")
    parser.add_argument("--shop", default="shop.db", help="file of the database")
    commands = parser.add_subparsers(dest="command", required=True)
    ordering = commands.add_parser("order")
    ordering.add_argument("customer")
    ordering.add_argument("pieces", type=int)
    ordering.add_argument("item")
    commands.add_parser("relay")
    commands.add_parser("invoice")
    options = parser.parse_args()
    try:
        shop = sqlite3.connect(options.shop, timeout=60.0)
        shop.executescript(TABLES)
        match options.command:
            case "order":
                order(shop, options.customer, options.pieces, options.item)
            case "relay":
                relay(shop, options.server)
            case _:
                invoice(options.server)
    except KeyboardInterrupt:
        sys.exit(130)
    except (ClientError, sqlite3.Error) as error:
        sys.exit(f"web_shop: {error}")
