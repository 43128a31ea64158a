"""Finding frames in damaged bytes: both twins of the codec return and raise the same."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from forebay.format.frame import encode_frame
from forebay.format.layout import Buffer
from forebay.limits import OFFSET_MAX
from support.codec_twins import U64_MAX, buffer_types, logs, same
from support.frame_logs import header

ANYTHING = False
MESSAGES_ONLY = True
numbers = st.one_of(
    st.integers(-1, 600), st.sampled_from([OFFSET_MAX, OFFSET_MAX + 1, U64_MAX, U64_MAX + 1])
)


@given(log=logs(), kind=buffer_types, cut=st.integers(0, 300), limit=st.integers(0, 3))
def test_the_same_frames_are_found_from_any_cut_on(
    log: bytes, kind: Callable[[bytes], Buffer], cut: int, limit: int
) -> None:
    data = log[cut:]
    for messages_only in (ANYTHING, MESSAGES_ONLY):
        for total in (len(data), len(data) + 100):
            same("find_frames", kind(data), len(data), total, 0, OFFSET_MAX, messages_only, limit)


@given(
    payload=st.binary(min_size=200, max_size=900),
    before=st.binary(max_size=80),
    after=st.binary(max_size=80),
    claimed=st.integers(0, 2000),
)
def test_long_frames_and_headers_that_claim_more_are_found_the_same(
    payload: bytes, before: bytes, after: bytes, claimed: int
) -> None:
    data = before + encode_frame(3, header(4, claimed) + payload) + after
    for total in (len(data), len(data) + claimed):
        same("find_frames", data, len(data), total, 0, 9, ANYTHING, 0)


@given(
    data=st.binary(max_size=100),
    stop=numbers,
    total=numbers,
    first=numbers,
    last=numbers,
    limit=numbers,
)
def test_numbers_out_of_range_are_refused_the_same(
    data: bytes, stop: int, total: int, first: int, last: int, limit: int
) -> None:
    same("find_frames", data, stop, total, first, last, ANYTHING, limit)
