"""The position of a stream over ledgers, as its checkpoint stores it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import UsageError
from forebay.limits import OFFSET_MAX
from forebay.pipeline.pulsar.seen import decode_seen, encode_seen

NUMBERS = st.frozensets(st.integers(0, 60) | st.integers(0, OFFSET_MAX), min_size=1)


@given(st.dictionaries(st.text(max_size=5), NUMBERS, max_size=4))
def test_what_was_encoded_is_decoded(seen: dict[str, frozenset[int]]) -> None:
    assert decode_seen(encode_seen(seen)) == seen


def test_consecutive_ledgers_take_the_room_of_two() -> None:
    assert encode_seen({"a": {5, 9, 6, 7}, "b": ()}) == {"a": "5-7,9"}
    assert encode_seen({"a": range(1_000_000)}) == {"a": "0-999999"}


def test_a_stream_has_a_limit_of_ledgers() -> None:
    with pytest.raises(UsageError, match="at most 1000000 ledgers"):
        encode_seen({"a": range(1_000_001)})


@pytest.mark.parametrize(
    "document",
    [None, [], {"a": ""}, {"a": 5}, {"a": "5-"}, {"a": "9-5"}, {"a": "0-9999999999"}, {"a": "x"}],
)
def test_anything_else_is_refused(document: object) -> None:
    with pytest.raises(UsageError, match="it should look like"):
        decode_seen(document)
