"""The hash of an object's content."""

from __future__ import annotations

from hashlib import sha256

from hypothesis import given
from hypothesis import strategies as st

from forebay.format.content import ContentHash


@given(st.lists(st.binary(max_size=50), max_size=8))
def test_the_hash_does_not_depend_on_how_the_bytes_are_cut(pieces: list[bytes]) -> None:
    cut = ContentHash()
    for piece in pieces:
        cut.add(memoryview(piece))
    assert cut.value == f"sha256:{sha256(b''.join(pieces)).hexdigest()}"
