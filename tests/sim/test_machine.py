"""Guarantees of the simulator's machine to the programs that run on it."""

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor

from tests.sim import machine


def test_one_thread_does_its_work_in_order_and_many_do_not() -> None:
    draw = random.Random(1)

    async def main() -> tuple[list[int], list[int]]:
        loop = asyncio.get_running_loop()
        orders: list[list[int]] = []
        for workers in (1, 2):
            order: list[int] = []
            with ThreadPoolExecutor(workers) as pool:
                await asyncio.gather(
                    *(loop.run_in_executor(pool, order.append, n) for n in range(9))
                )
            orders.append(order)
        return orders[0], orders[1]

    with machine.quietly():
        of_one, of_two = machine.run(main, thread_s=draw.random, end_s=100.0)
    assert of_one == list(range(9))
    assert of_two != of_one
    assert sorted(of_two) == of_one
