"""What BookKeeper knows about a ledger: what brokers need is written, nonsense is refused."""

from __future__ import annotations

import pytest

from forebay.errors import LedgerError
from forebay.format.pulsar.ledger_metadata import (
    LedgerMetadata,
    decode_ledger_metadata,
    encode_ledger_metadata,
)
from forebay.format.pulsar.protobuf import fields, put_bytes, put_number

METADATA = LedgerMetadata(300, 29)
ENCODED = encode_ledger_metadata(METADATA)


def test_all_fields_that_a_broker_reads_are_written_in_order() -> None:
    numbers = [field.number for field in fields(ENCODED, 0, len(ENCODED), "it")]
    assert numbers == [1, 2, 3, 4, 5, 6, 7, 9, 10]


def test_a_ledger_is_closed_unless_it_says_otherwise() -> None:
    assert METADATA.closed
    assert not decode_ledger_metadata(b"".join(put_number(n, 1) for n in (1, 2, 3))).closed


def test_a_password_and_unknown_fields_are_skipped() -> None:
    more = ENCODED + put_bytes(8, b"secret") + put_number(12, 5) + put_bytes(999, b"")
    assert decode_ledger_metadata(more) == METADATA


@pytest.mark.parametrize(
    ("data", "wrong"),
    [
        (b"", "lacks its field 1, quorumSize"),
        (ENCODED + put_number(5, 4), "unknown state 4"),
        (ENCODED + put_number(7, 0), "unknown digest type 0"),
        (ENCODED + put_number(3, -1), "-1 bytes"),
        (ENCODED + put_number(4, -2), "last entry is -2"),
        (ENCODED + put_bytes(6, b""), "lacks its first entry"),
        (ENCODED + put_bytes(3, b""), "not a number"),
        (ENCODED + put_number(6, 1), "not a message"),
        (ENCODED[:-1], "inside a field"),
    ],
)
def test_what_breaks_a_rule_is_refused(data: bytes, wrong: str) -> None:
    with pytest.raises(LedgerError, match=wrong):
        decode_ledger_metadata(data)


def test_custom_metadata_that_is_no_text_is_refused_as_text() -> None:
    metadata = LedgerMetadata(1, 0, custom=(("x", b"\xff"),))
    with pytest.raises(LedgerError, match="not UTF-8"):
        metadata.text("x")
    assert metadata.text("y") is None
