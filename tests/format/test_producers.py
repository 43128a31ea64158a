"""The row of idempotent producers, and how their messages are told in the log."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import DescriptorError
from forebay.format.codec import encode_many
from forebay.format.frame import encode_frame, scan
from forebay.format.message import encode_head, encode_middle
from forebay.format.producers import (
    KnownProducer,
    ProducersRow,
    Run,
    decode_producers_row,
    encode_producers_row,
    idempotent_id,
    last_runs,
)
from forebay.limits import OFFSET_MAX
from support.codec_twins import messages

TOPIC = "/default/t"


def frames_of(name: str, first: int, offset: int, count: int, *, idempotent: bool = True) -> bytes:
    number = idempotent_id(TOPIC, name) & (2**64 - 1 if idempotent else 2**63 - 1)
    head, middle = encode_head(0, number, TOPIC, ""), encode_middle(name, None)
    raw, _ = encode_many(head, middle, offset, [b"m"] * count, 0, 5, None, None, 2**30, first)
    return bytes(raw)


def test_ids_are_the_same_everywhere_and_tell_idempotent_producers() -> None:
    assert idempotent_id(TOPIC, "meter") == 0xB49717C118EC068C
    assert idempotent_id(TOPIC, "scale") != idempotent_id("/default/u", "scale")


def test_the_last_run_of_each_producer_is_found() -> None:
    a, b = (idempotent_id(TOPIC, name) for name in "ab")
    raw = (
        frames_of("a", 1, 0, 3)
        + frames_of("b", 7, 3, 1)
        + frames_of("a", 4, 4, 2)
        + frames_of("c", 1, 6, 2, idempotent=False)
        + frames_of("a", 6, 8, 1)
    )
    found = last_runs(scan(raw), TOPIC)
    assert found == {b: Run(7, 3, 1), a: Run(6, 8, 1)}
    assert list(found) == [b, a]
    assert last_runs(scan(raw), "/default/other") == {}
    first = last_runs(scan(frames_of("a", 4, 4, 9)), TOPIC)
    assert first == {a: Run(4, 4, 9)}
    assert Run(1, 1, 3).followed_by(first[a])
    assert not Run(1, 0, 3).followed_by(first[a])


@given(st.lists(messages(), max_size=4))
def test_messages_of_others_are_never_taken_for_those_of_idempotent_producers(
    others: list[bytes],
) -> None:
    raw = b"".join(encode_frame(offset, each) for offset, each in enumerate(others))
    assert last_runs(scan(raw), TOPIC) == {}


rows = st.builds(
    ProducersRow,
    st.integers(0, OFFSET_MAX),
    st.lists(
        st.builds(
            KnownProducer,
            st.integers(2**63, 2**64 - 1),
            st.integers(0, OFFSET_MAX),
            st.integers(0, OFFSET_MAX),
        ),
        max_size=4,
    ).map(tuple),
    st.booleans(),
    st.none() | st.text(max_size=9),
    st.integers(0, OFFSET_MAX),
)


@given(rows)
def test_a_row_is_read_as_it_was_written(row: ProducersRow) -> None:
    assert decode_producers_row(encode_producers_row(row), "row") == row


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b"[]",
        b"{}",
        b'{"complete":true,"offset":-1,"producers":[]}',
        b'{"complete":true,"offset":1,"producers":[["zz",1,1]]}',
        b'{"complete":true,"offset":1,"producers":[["aa",1]]}',
        b'{"complete":true,"offset":1,"producers":7}',
        b'{"complete":true,"offset":1,"origin":7,"producers":[]}',
        b'{"complete":true,"offset":1,"producers":[["aa",1,1.5]]}',
    ],
)
def test_a_damaged_row_is_refused_by_name(bad: bytes) -> None:
    with pytest.raises(DescriptorError, match="the row of t"):
        decode_producers_row(bad, "the row of t")


def test_fields_that_are_not_known_are_ignored() -> None:
    row = decode_producers_row(b'{"complete":1,"later":2,"offset":3,"producers":[]}', "row")
    assert row == ProducersRow(3)
