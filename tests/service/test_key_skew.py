"""The skew of keys: shares of a sample, and what salts give."""

from collections import Counter

import pytest

from tidelog.service.cli.topics import skew_of
from tidelog.storage.codec.key_partition import partition_of


def test_hot_key_and_its_salts() -> None:
    sample = Counter({(b"hot", partition_of(b"hot", 8)): 800})
    for number in range(200):
        key = b"k%d" % number
        sample[key, partition_of(key, 8)] += 1
    skew = skew_of(sample, 8, top=1, salts=32)
    assert skew is not None
    assert (skew.sampled, skew.keys, skew.hottest) == (1_000, 201, partition_of(b"hot", 8))
    assert skew.share > 0.8
    assert skew.top == [(b"hot", partition_of(b"hot", 8), 0.8, 1)]
    assert skew.average == 0.125
    assert skew.average <= skew.salted_share < 0.35


def test_one_salt_only_moves_key() -> None:
    skew = skew_of(Counter({(b"a", 0): 10}), 4, top=5, salts=1)
    assert skew is not None
    assert skew.salted_share == 1.0


def test_records_without_key_have_no_salt() -> None:
    skew = skew_of(Counter({(None, 0): 3, (None, 1): 1}), 2, top=5, salts=4)
    assert skew is not None
    assert (skew.keys, skew.top, skew.share) == (0, [], 0.75)
    assert skew.salted_share == pytest.approx(0.75)


def test_nothing_is_no_skew() -> None:
    assert skew_of(Counter(), 3, top=5, salts=4) is None
