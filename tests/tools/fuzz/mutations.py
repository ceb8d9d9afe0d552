"""Valid bytes made invalid: flips, cuts, insertions, lengths blown up, splices of two inputs."""

import random

EDGES = (0, 1, 0x7F, 0x80, 0xFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 2**63 - 1, 2**64 - 1)
WORDS = (
    *(
        b"null",
        b"true",
        b"{}",
        b"[]",
        b'""',
        b"-1",
        b"1e999",
        b"9" * 25,
        b"\\ud800",
        b"\xff",
        b"\0",
    ),
    *(b'{"a":' * 40, b"[" * 40),
    *(b"\xc0", b"\xd9\xff", b"\xdf\xff\xff\xff\xff", b"\xcf" + b"\xff" * 8, b"\xcb" + b"\x7f" * 8),
)
"""Of JSON, and of MessagePack: nil, long strings and maps, the largest integer, a float."""


def mutated(seeds: list[bytes], draw: random.Random) -> bytes:
    """One of the seeds after one to four changes."""
    data = bytearray(draw.choice(seeds))
    for _ in range(draw.randint(1, 4)):
        position = draw.randrange(len(data) + 1)
        match draw.randrange(8):
            case 0 if position < len(data):
                data[position] ^= 1 << draw.randrange(8)
            case 1 if position < len(data):
                data[position] = draw.choice((0, 1, 0x7F, 0x80, 0xC0, 0xFF, draw.randrange(256)))
            case 2:
                del data[position:]
            case 3:
                del data[position : position + draw.randint(1, 16)]
            case 4:
                data[position:position] = draw.choice(WORDS)
            case 5:  # a length, or another number, that is not so
                width = draw.choice((1, 2, 4, 8))
                value = draw.choice(EDGES) % (1 << 8 * width)
                data[position : position + width] = value.to_bytes(
                    width, draw.choice(("little", "big"))
                )
            case 6:
                other = draw.choice(seeds)
                first = draw.randrange(len(other) + 1)
                data[position:] = other[first : first + draw.choice((8, 64, len(other)))]
            case _:
                first = draw.randrange(len(data) + 1)
                data[position:position] = data[first : first + draw.randint(1, 64)]
    return bytes(data)
