"""Why bytes are no records of a batch: the errors of all ways to read them. Pure."""

from collections.abc import Callable, Sequence

from tidelog.storage.codec.batch_header import InvalidBatch

HEADERS_MAX = 100_000
"""Bound of the headers in a batch, like RECORDS_MAX: a header costs CPU, but only two bytes."""


class TooManyHeaders(InvalidBatch):
    """A batch has more headers than the caller allows."""


def cut_off() -> InvalidBatch:
    return InvalidBatch("the records are cut off")


def stray() -> InvalidBatch:
    return InvalidBatch("the records do not end at the end of their batch")


def wrong_length() -> InvalidBatch:
    return InvalidBatch("a record's content does not end at the record's end")


def negative() -> InvalidBatch:
    return InvalidBatch("a length or a number of headers is negative")


def too_long() -> InvalidBatch:
    return InvalidBatch("a number of a record is too long")


def too_many_headers() -> InvalidBatch:
    return TooManyHeaders(f"a batch has more than {HEADERS_MAX} headers: send fewer records in it")


def wrong_name() -> InvalidBatch:
    return InvalidBatch("the name of a header is not UTF-8")


def wrong_offset(number: int) -> InvalidBatch:
    return InvalidBatch(f"the offset delta of record {number} of a batch is not {number}")


REASONS: Sequence[Callable[[int], InvalidBatch]] = (
    lambda _: cut_off(),
    lambda _: stray(),
    lambda _: wrong_length(),
    lambda _: negative(),
    lambda _: too_long(),
    lambda _: too_many_headers(),
    lambda _: wrong_name(),
    wrong_offset,
)
"""The errors of the reasons of native.c, in the same order. They take the number of the record."""
