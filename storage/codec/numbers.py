"""The numbers of records: zigzag varints, one at a place, and many at many places. Pure."""

import numpy as np

from tidelog.storage.codec.refusals import too_long

INT_MAX, LONG_MAX = (5, 32), (10, 64)
"""For an int and a long: the most bytes of a varint, and the bits of its number."""


def number_at(raw: bytes, start: int, size: tuple[int, int] = INT_MAX) -> tuple[int, int]:
    """Return the number of the varint at `start`, still zigzag, and the place behind it."""
    number = shift = 0
    bytes_max, bits = size
    for byte in raw[start : start + bytes_max]:
        number |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            if number >> bits:
                break
            return number, start + shift // 7
    raise too_long()


def numbers_at(
    buffer: np.ndarray, starts: np.ndarray, size: tuple[int, int] = INT_MAX
) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of the varints at `starts`, int64, and the places behind them.

    Raises IndexError if a varint is not within the buffer; no place is negative.
    """
    byte = buffer[starts]
    if not byte.size or byte.max() < 128:
        number = byte.astype(np.int64)
        return (number >> 1) ^ -(number & 1), starts + 1
    # Most numbers have at most two bytes. `following` is not used for a number of one byte.
    is_long = byte >> 7
    following = buffer.take(starts + 1, mode="clip")
    if (following & -is_long).max() > 127:
        return _long_numbers(buffer, starts, size)
    number = (byte & 127) | ((following * is_long).astype(np.int64) << 7)
    return (number >> 1) ^ -(number & 1), starts + 1 + is_long


def _long_numbers(
    buffer: np.ndarray, starts: np.ndarray, size: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    bytes_max, bits = size
    byte = buffer[starts]
    long = np.flatnonzero(byte > 127)
    number = (byte & 127).astype(np.uint64)
    behind = starts + 1
    for position in range(1, bytes_max):
        byte = buffer[behind[long]]
        behind[long] += 1
        if position == bytes_max - 1 and (byte >> (bits - 7 * position)).any():
            break
        number[long] |= (byte & 127).astype(np.uint64) << np.uint64(7 * position)
        long = long[byte > 127]
        if not len(long):
            signed = (number >> np.uint64(1)).astype(np.int64)
            return signed ^ -(number & np.uint64(1)).astype(np.int64), behind
    raise too_long()
