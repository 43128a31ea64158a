"""Begin markers and their names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import FormatError
from forebay.format.marker import BeginMarker, decode_marker, encode_marker
from forebay.format.names import MarkerName, parse_marker
from forebay.limits import OFFSET_MAX

MARKER = BeginMarker("0" * 32, "1" * 32, 5, 100)


def test_a_marker_is_decoded_as_it_was_encoded() -> None:
    data = encode_marker(MARKER)
    assert data == (
        b'{"begin":100,"epoch":5,"log_id":"00000000000000000000000000000000",'
        b'"nonce":"11111111111111111111111111111111"}'
    )
    assert decode_marker(data, "it") == MARKER
    assert decode_marker(data.replace(b"{", b'{"later":1,', 1), "it") == MARKER


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b"[" * 5000,
        encode_marker(MARKER) + b" " * 5000,
        encode_marker(MARKER).replace(b"100", b"-1"),
        encode_marker(MARKER).replace(b"100", b'"100"'),
        encode_marker(MARKER).replace(b"11", b"zz"),
    ],
)
def test_a_damaged_marker_is_an_error_that_names_it(data: bytes) -> None:
    with pytest.raises(FormatError, match="begin-7"):
        decode_marker(data, "begin-7")


@given(st.integers(0, OFFSET_MAX), st.integers(0, 999_999_999))
def test_the_name_of_a_marker_is_parsed_as_it_was_made(offset: int, attempt: int) -> None:
    assert parse_marker(str(MarkerName(offset, attempt))) == (offset, attempt)


@pytest.mark.parametrize("name", ["begin-", "begin-01", "begin-1-0", "begin-1-x", "data-1-2.dnb1"])
def test_other_names_are_no_markers(name: str) -> None:
    assert parse_marker(name) is None
