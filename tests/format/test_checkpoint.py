"""Checkpoints: only a whole and plausible one is read; all else raises CheckpointError.

Bodies with a right checksum and a wrong content are what a faulty or a hostile writer leaves.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.errors import CheckpointError
from forebay.format.checkpoint import (
    VERSION,
    SegmentEntry,
    UploaderCheckpoint,
    WalCheckpoint,
    decode_any_checkpoint,
    decode_checkpoint,
    decode_danube_uploader_checkpoint,
    decode_danube_wal_checkpoint,
    encode_checkpoint,
    is_checkpoint,
)
from forebay.limits import OFFSET_MAX

WAL: Final = WalCheckpoint(3, 9, (SegmentEntry(1, 3, 6), SegmentEntry(2, 6, None)), 1_700_000_000)
UPLOADER: Final = UploaderCheckpoint(
    5, 1, 464, "data-0-5.dnb1", 1_700_000_000, 6, 146, 1, ((6, 0),), 1_700_000_000, 1_700_000_001
)
WAL_KIND: Final = 1
UPLOADER_KIND: Final = 2


def sealed(body: bytes, kind: int = WAL_KIND, version: int = VERSION) -> bytes:
    """A checkpoint around any body, with the checksum it should have."""
    head = b"FBCK" + struct.pack("<HHI", version, kind, len(body))
    return head + struct.pack("<I", crc32(head + body)) + body


def body_of(checkpoint: WalCheckpoint | UploaderCheckpoint) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(encode_checkpoint(checkpoint)[16:])
    return found


def changed(checkpoint: WalCheckpoint | UploaderCheckpoint, **values: object) -> bytes:
    kind = WAL_KIND if isinstance(checkpoint, WalCheckpoint) else UPLOADER_KIND
    return sealed(json.dumps(body_of(checkpoint) | values).encode(), kind)


# ---- round trips ----

numbers = st.integers(0, OFFSET_MAX)
maybe_numbers = st.none() | numbers


@st.composite
def wal_checkpoints(draw: st.DrawFn) -> WalCheckpoint:
    edges = sorted(draw(st.lists(numbers, min_size=1, max_size=7)))
    seqs = sorted(draw(st.sets(numbers, min_size=len(edges) - 1, max_size=len(edges) - 1)))
    entries = [
        SegmentEntry(seq, first, end)
        for seq, first, end in zip(seqs, edges, edges[1:], strict=False)
    ]
    active = draw(st.booleans())
    if entries and active:
        entries[-1] = SegmentEntry(entries[-1].seq, entries[-1].first_offset, None)
    return WalCheckpoint(edges[0], edges[-1], tuple(entries), draw(maybe_numbers))


uploader_checkpoints = st.builds(
    UploaderCheckpoint,
    maybe_numbers,
    numbers,
    numbers,
    st.none() | st.text(st.characters(codec="utf-8"), max_size=20),
    numbers,
    maybe_numbers,
    numbers,
    numbers,
    st.lists(st.tuples(numbers, numbers), max_size=4).map(tuple),
    numbers,
    numbers,
)


@settings(max_examples=150)
@given(checkpoint=wal_checkpoints())
def test_a_checkpoint_of_the_log_comes_back_as_it_was(checkpoint: WalCheckpoint) -> None:
    data = encode_checkpoint(checkpoint)
    assert is_checkpoint(data)
    assert decode_checkpoint(data, WalCheckpoint) == checkpoint


@settings(max_examples=100)
@given(checkpoint=uploader_checkpoints)
def test_a_checkpoint_of_the_uploader_comes_back_as_it_was(checkpoint: UploaderCheckpoint) -> None:
    data = encode_checkpoint(checkpoint)
    assert decode_checkpoint(data, UploaderCheckpoint) == checkpoint
    assert decode_any_checkpoint(data) == checkpoint


def test_an_empty_log_has_no_last_offset() -> None:
    assert WalCheckpoint(0, 0, ()).last_offset is None
    assert WalCheckpoint(0, 1, ()).last_offset == 0
    assert WAL.last_offset == 8


# ---- damage ----


@pytest.mark.parametrize("checkpoint", [WAL, UPLOADER])
def test_every_single_bit_of_damage_is_noticed(
    checkpoint: WalCheckpoint | UploaderCheckpoint,
) -> None:
    data = encode_checkpoint(checkpoint)
    for at in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[at] ^= 1 << bit
            with pytest.raises(CheckpointError):
                decode_any_checkpoint(bytes(damaged))


@pytest.mark.parametrize("checkpoint", [WAL, UPLOADER])
def test_a_checkpoint_cut_at_any_byte_is_refused(
    checkpoint: WalCheckpoint | UploaderCheckpoint,
) -> None:
    data = encode_checkpoint(checkpoint)
    for cut in range(len(data)):
        with pytest.raises(CheckpointError):
            decode_any_checkpoint(data[:cut])


def test_bytes_behind_a_checkpoint_are_refused() -> None:
    with pytest.raises(CheckpointError, match="length"):
        decode_any_checkpoint(encode_checkpoint(WAL) + b" ")


@pytest.mark.parametrize("version", [0, 2, 0xFFFF])
def test_an_unknown_version_is_refused_by_its_number(version: int) -> None:
    data = sealed(encode_checkpoint(WAL)[16:], version=version)
    with pytest.raises(CheckpointError, match=rf"version {version}\b"):
        decode_any_checkpoint(data)


@pytest.mark.parametrize("kind", [0, 3, 0xFFFF])
def test_an_unknown_kind_is_refused_by_its_number(kind: int) -> None:
    with pytest.raises(CheckpointError, match=rf"\b{kind}$"):
        decode_any_checkpoint(sealed(encode_checkpoint(WAL)[16:], kind))


def test_the_other_kind_is_refused() -> None:
    with pytest.raises(CheckpointError, match="UploaderCheckpoint"):
        decode_checkpoint(encode_checkpoint(UPLOADER), WalCheckpoint)
    with pytest.raises(CheckpointError, match="WalCheckpoint"):
        decode_checkpoint(encode_checkpoint(WAL), UploaderCheckpoint)


@settings(max_examples=200)
@given(data=st.binary(max_size=120), framed=st.booleans(), kind=st.integers(0, 3))
def test_no_bytes_raise_anything_but_checkpoint_error(data: bytes, framed: bool, kind: int) -> None:
    with pytest.raises(CheckpointError):
        decode_any_checkpoint(sealed(data, kind) if framed else data)


# ---- bodies with a right checksum ----

_PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
_NESTED = st.lists(_PLAIN, max_size=3) | st.dictionaries(st.text(max_size=5), _PLAIN, max_size=3)
JSON_VALUES = _PLAIN | _NESTED | st.lists(_NESTED, max_size=3)


@settings(max_examples=200)
@given(value=JSON_VALUES, kind=st.sampled_from([WAL_KIND, UPLOADER_KIND]))
def test_any_other_json_is_refused(value: object, kind: int) -> None:
    with pytest.raises(CheckpointError):
        decode_any_checkpoint(sealed(json.dumps(value).encode(), kind))


WRONG_NUMBERS: Final[list[object]] = [
    None, True, False, -1, 1.0, 1.5, float("nan"), float("inf"), "1", "", [], [1], {},
    OFFSET_MAX + 1, 2**64, 10**4000,
]  # fmt: skip
WAL_NUMBERS: Final = ["start_offset", "next_offset"]
UPLOADER_NUMBERS: Final = [
    "last_read_file_seq",
    "last_read_byte_position",
    "updated_at",
    "active_bytes_written",
    "active_msgs_written",
    "opened_at_unix",
    "last_activity_unix",
]


@pytest.mark.parametrize("wrong", WRONG_NUMBERS, ids=lambda value: repr(value)[:20])
def test_a_wrong_value_for_a_number_is_refused_by_its_name(wrong: object) -> None:
    for checkpoint, names in ((WAL, WAL_NUMBERS), (UPLOADER, UPLOADER_NUMBERS)):
        for name in names:
            with pytest.raises(CheckpointError, match=name):
                decode_any_checkpoint(changed(checkpoint, **{name: wrong}))
    if wrong is not None:
        with pytest.raises(CheckpointError, match="rotated_at_ms"):
            decode_any_checkpoint(changed(WAL, rotated_at_ms=wrong))
        with pytest.raises(CheckpointError, match="last_committed_offset"):
            decode_any_checkpoint(changed(UPLOADER, last_committed_offset=wrong))
        with pytest.raises(CheckpointError, match="active_start_offset"):
            decode_any_checkpoint(changed(UPLOADER, active_start_offset=wrong))


@pytest.mark.parametrize("wrong", WRONG_NUMBERS, ids=lambda value: repr(value)[:20])
def test_a_wrong_value_in_a_segment_is_refused_by_its_name(wrong: object) -> None:
    # An active segment has no end.
    names = ("seq", "first_offset") if wrong is None else ("seq", "first_offset", "end_offset")
    for name in names:
        segment = {"seq": 2, "first_offset": 6, "end_offset": 9} | {name: wrong}
        with pytest.raises(CheckpointError, match=name):
            decode_any_checkpoint(changed(WAL, segments=[segment]))


@pytest.mark.parametrize("wrong", [1, True, 1.5, [], {}, ["x"]])
def test_an_object_id_is_text_or_nothing(wrong: object) -> None:
    with pytest.raises(CheckpointError, match="last_object_id"):
        decode_any_checkpoint(changed(UPLOADER, last_object_id=wrong))


def test_without_an_open_object_a_checkpoint_of_the_uploader_says_nothing_of_one() -> None:
    plain = UploaderCheckpoint(5, 1, 464, None, 7)
    assert (
        body_of(plain).items()
        >= {
            "active_start_offset": None,
            "active_bytes_written": 0,
            "active_msgs_written": 0,
            "index_entries_in_progress": [],
            "opened_at_unix": 0,
            "last_activity_unix": 0,
        }.items()
    )
    assert decode_any_checkpoint(encode_checkpoint(plain)) == plain


@pytest.mark.parametrize(
    "wrong", ["abc", {"a": 1}, [1], [[1]], [[1, 2, 3]], [[1, -1]], [[-1, 1]], [["1", 2]], [{}]]
)
def test_index_entries_are_pairs_of_numbers(wrong: object) -> None:
    with pytest.raises(CheckpointError):
        decode_any_checkpoint(changed(UPLOADER, index_entries_in_progress=wrong))


@pytest.mark.parametrize(
    "wrong",
    [None, 1, True, 1.5, "", {}, [[True, 1]], [[1, False]], [[OFFSET_MAX + 1, 0]], [[0, 10**30]]],
)
def test_index_entries_are_a_list_and_within_the_limits(wrong: object) -> None:
    with pytest.raises(CheckpointError):
        decode_any_checkpoint(changed(UPLOADER, index_entries_in_progress=wrong))


@pytest.mark.parametrize("wrong", [None, 1, "", "abc", {}, {"seq": 1}, [1], ["seq"], [[]], [{}]])
def test_segments_are_a_list_of_segments(wrong: object) -> None:
    with pytest.raises(CheckpointError):
        decode_any_checkpoint(changed(WAL, segments=wrong))


def entry(seq: int, first: int, end: int | None) -> dict[str, int | None]:
    return {"seq": seq, "first_offset": first, "end_offset": end}


@pytest.mark.parametrize(
    "segments",
    [
        pytest.param([entry(2, 3, 6), entry(1, 6, None)], id="seq goes back"),
        pytest.param([entry(1, 3, 6), entry(1, 6, None)], id="seq repeats"),
        pytest.param([entry(1, 6, 9), entry(2, 3, 6)], id="offsets go back"),
        pytest.param([entry(1, 3, 7), entry(2, 6, None)], id="overlap"),
        pytest.param([entry(1, 6, 3)], id="ends before it starts"),
        pytest.param([entry(1, 3, 10)], id="ends beyond the log"),
        pytest.param([entry(1, 10, None)], id="starts beyond the log"),
        pytest.param([entry(1, 3, None), entry(2, 9, None)], id="active before the last"),
        pytest.param([entry(1, 3, None), entry(2, 9, 9)], id="active, then sealed"),
    ],
)
def test_segments_out_of_order_are_refused(segments: list[dict[str, int | None]]) -> None:
    with pytest.raises(CheckpointError, match="segment"):
        decode_any_checkpoint(changed(WAL, segments=segments))


def test_a_start_beyond_the_end_is_refused() -> None:
    with pytest.raises(CheckpointError, match="start_offset"):
        decode_any_checkpoint(changed(WAL, start_offset=10, segments=[]))


@pytest.mark.parametrize("checkpoint", [WAL, UPLOADER])
def test_a_field_too_few_or_too_many_is_refused(
    checkpoint: WalCheckpoint | UploaderCheckpoint,
) -> None:
    kind = WAL_KIND if isinstance(checkpoint, WalCheckpoint) else UPLOADER_KIND
    body = body_of(checkpoint)
    with pytest.raises(CheckpointError, match="fields"):
        decode_any_checkpoint(sealed(json.dumps(body | {"more": 1}).encode(), kind))
    for name in body:
        fewer = {key: value for key, value in body.items() if key != name}
        with pytest.raises(CheckpointError, match="fields"):
            decode_any_checkpoint(sealed(json.dumps(fewer).encode(), kind))


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"[" * 200_000, id="deep lists"),
        pytest.param(b'{"a":' * 100_000, id="deep objects"),
        pytest.param(b"[" * 200_000 + b"]" * 200_000, id="deep and whole"),
        pytest.param(b"9" * 100_000, id="a long number"),
        pytest.param(b"\xff\xfe{}", id="not UTF-8"),
        pytest.param(json.dumps(body_of(WAL)).encode("utf-16"), id="UTF-16"),
        pytest.param(b"\xef\xbb\xbf" + json.dumps(body_of(WAL)).encode(), id="byte order mark"),
        pytest.param(b"NaN", id="NaN"),
        pytest.param(b"{}{}", id="two bodies"),
    ],
)
@pytest.mark.parametrize("kind", [WAL_KIND, UPLOADER_KIND])
def test_a_hostile_body_is_refused(body: bytes, kind: int) -> None:
    with pytest.raises(CheckpointError):
        decode_any_checkpoint(sealed(body, kind))


# ---- Danube's ----

DANUBE_WAL: Final = bytes.fromhex(
    "000501172f772f64656661756c742f74312f77616c2e312e6c6f670100152f772f64656661756c742f74312f77616c"
    "2e6c6f6700010977616c2e312e6c6f67000103"
)
DANUBE_UPLOADER: Final = bytes.fromhex(
    "05000000000000000100000000000000d001000000000000010d00000000000000646174612d302d352e646e623100"
    "f1536500000000"
)


def test_danubes_checkpoint_is_refused_by_its_name() -> None:
    assert not is_checkpoint(DANUBE_WAL)
    with pytest.raises(CheckpointError, match=r"Danube's wal\.ckpt"):
        decode_checkpoint(DANUBE_WAL, WalCheckpoint)
    with pytest.raises(CheckpointError, match=r"Danube's uploader\.ckpt"):
        decode_checkpoint(DANUBE_UPLOADER, UploaderCheckpoint)
    with pytest.raises(CheckpointError, match=r"'FBCK'$"):
        decode_any_checkpoint(b"\xff" * 50)


@pytest.mark.parametrize(
    ("decode", "data", "mistaken"),
    [
        pytest.param(decode_danube_wal_checkpoint, DANUBE_WAL, [], id="wal.ckpt"),
        # These five bytes are also a whole varint checkpoint of small numbers.
        pytest.param(decode_danube_uploader_checkpoint, DANUBE_UPLOADER, [5], id="uploader.ckpt"),
    ],
)
def test_danubes_checkpoints_cut_or_prolonged_are_refused(
    decode: Callable[[bytes], object], data: bytes, mistaken: list[int]
) -> None:
    for cut in set(range(len(data))) - set(mistaken):
        with pytest.raises(CheckpointError):
            decode(data[:cut])
    with pytest.raises(CheckpointError):
        decode(data + b"\0")


@settings(max_examples=200)
@given(
    data=st.binary(max_size=120)
    | st.tuples(st.integers(0, 90), st.integers(0, 255)).map(
        lambda change: bytes([*DANUBE_WAL[: change[0]], change[1], *DANUBE_WAL[change[0] + 1 :]])
    )
)
def test_no_damage_to_danubes_checkpoints_raises_anything_but_checkpoint_error(data: bytes) -> None:
    for decode in (decode_danube_wal_checkpoint, decode_danube_uploader_checkpoint):
        with suppress(CheckpointError):
            decode(data)


@pytest.mark.parametrize("count", [2**16, 2**32, 2**64 - 1])
def test_a_count_of_rotated_files_that_cannot_be_is_refused_at_once(count: int) -> None:
    data = bytes(32) + struct.pack("<Q", count) + bytes(100)
    with pytest.raises(CheckpointError):
        decode_danube_wal_checkpoint(data)


def test_a_path_that_is_not_utf_8_is_refused() -> None:
    damaged = DANUBE_WAL.replace(b"/default/", b"/\xff\xff\xff\xff\xff\xff\xff/")
    with pytest.raises(CheckpointError):
        decode_danube_wal_checkpoint(damaged)
