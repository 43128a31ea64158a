"""Both twins of the codec side by side, and what to compare them with.

Importing this skips a suite where the compiled twin was not built.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Final

import pytest
from hypothesis import strategies as st

from forebay.format import pure
from forebay.format.frame import encode_frame
from forebay.format.layout import Buffer
from forebay.limits import OFFSET_MAX

_native: Any = pytest.importorskip(
    "forebay.format._native", reason="the compiled twin of the codec was not built"
)


def _encode_one(head: Any, middle: Any, offset: Any, *rest: Any) -> bytes:
    """A frame made by appending to a run: the compiled twin has no other way."""
    run = pure.new_run()
    assert _native.append_one(run, offset, head, middle, *rest) == offset
    return bytes(pure.run_frames(run))


native: Any = SimpleNamespace(
    scan=_native.scan,
    find_frames=_native.find_frames,
    columns=_native.columns,
    survey=_native.survey,
    gather=_native.gather,
    append_one=_native.append_one,
    encode_many=_native.encode_many,
    encode_one=_encode_one,
    module=_native,
)

HEADER_BYTES: Final = pure.HEADER.size
U64_MAX: Final = 2**64 - 1
ANY_ORDER: Final = False
CONSECUTIVE: Final = True

# ---- the comparison ----


def outcome(function: Callable[..., Any], *args: object) -> object:
    """The result with its columns as bytes, or the type of the exception."""
    try:
        result = function(*args)
    except Exception as error:  # noqa: BLE001 - which one it is is the point
        return type(error)
    if isinstance(result, tuple):
        return tuple(bytes(part) if isinstance(part, memoryview) else part for part in result)
    return result


def same(name: str, *args: object) -> object:
    """What both twins return, after checking that they agree."""
    plain = outcome(getattr(pure, name), *args)
    assert outcome(getattr(native, name), *args) == plain
    return plain


def same_columns_of(buffer: Buffer) -> None:
    """Compares all frames, and each one alone: columns stop at the first that is no message."""
    _, positions, lengths, *_ = pure.scan(buffer, 0, -1, ANY_ORDER)
    same("columns", buffer, positions, lengths)
    for topic in (b"/default/t", b"t", b""):
        same("survey", buffer, positions, lengths, topic)
    for row in range(len(positions)):
        same("columns", buffer, positions[row : row + 1], lengths[row : row + 1])


# ---- messages in every encoding ----


def fixed(value: int) -> bytes:
    return struct.pack("<Q", value)


def varint(value: int) -> bytes:
    if value < 251:
        return bytes([value])
    for mark, kind, limit in ((251, "<BH", 2**16), (252, "<BI", 2**32), (253, "<BQ", 2**64)):
        if value < limit:
            return struct.pack(kind, mark, value)
    raise AssertionError(value)


numbers = st.one_of(st.integers(0, 300), st.integers(0, U64_MAX))
short = st.binary(max_size=20)


@st.composite
def messages(draw: st.DrawFn) -> bytes:
    """Encoded messages with none, two or three of the later fields, in either flavour."""
    number = draw(st.sampled_from([fixed, varint]))

    def text(raw: bytes) -> bytes:
        return number(len(raw)) + raw

    def option(strategy: st.SearchStrategy[bytes]) -> bytes:
        value = draw(st.none() | strategy)
        return b"\0" if value is None else b"\1" + value

    texts, u64 = short.map(text), numbers.map(number)
    pairs = draw(st.lists(st.tuples(texts, texts), max_size=3))
    u32 = st.integers(0, 2**32 - 1).map(
        lambda value: struct.pack("<I", value) if number is fixed else varint(value)
    )
    topic = draw(st.sampled_from([b"/default/t", b"t", b"", b"/"]))
    parts = [draw(u64), draw(u64), text(topic), draw(texts), draw(u64)]
    parts += [text(draw(st.binary(max_size=300))), draw(u64), draw(texts), option(texts)]
    parts += [number(len(pairs)), *(part for pair in pairs for part in pair)]
    later = draw(st.sampled_from([0, 2, 3]))
    parts += [option(u64), option(u32)] if later >= 2 else []
    parts += [option(texts)] if later == 3 else []
    return b"".join(parts)


@st.composite
def logs(draw: st.DrawFn, payloads: st.SearchStrategy[bytes] | None = None) -> bytes:
    """Frames with consecutive offsets, mostly."""
    offset = draw(st.sampled_from([0, 7, OFFSET_MAX - 1]) | st.integers(0, OFFSET_MAX))
    frames = []
    for payload in draw(st.lists(messages() if payloads is None else payloads, max_size=4)):
        frames.append(encode_frame(offset % 2**64, payload))
        offset += draw(st.sampled_from([1, 1, 1, 1, 0, 5]))
    return b"".join(frames)


@st.composite
def damage(draw: st.DrawFn, whole: bytes) -> bytes:
    """Bit flips, runs of zeros or ones, splices, random headers and cuts."""
    raw = bytearray(whole)
    for _ in range(draw(st.integers(1, 3))):
        if not raw:
            break
        at, length = draw(st.integers(0, len(raw) - 1)), draw(st.integers(1, 24))
        kind = draw(st.sampled_from(["flip", "run", "splice", "move", "header", "cut"]))
        if kind == "flip":
            raw[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "run":
            raw[at : at + length] = draw(st.sampled_from([b"\0", b"\xff"])) * length
        elif kind == "splice":
            raw[at:at] = draw(st.binary(max_size=24))
        elif kind == "move":
            raw[at : at + length] = raw[draw(st.integers(0, len(raw) - 1)) :][:length]
        elif kind == "header":
            sizes = st.integers(0, 40) | st.integers(0, 2**32 - 1)
            raw[at : at + HEADER_BYTES] = pure.HEADER.pack(draw(numbers), draw(sizes), 0)
        else:
            del raw[at:]
    return bytes(raw)


buffer_types = st.sampled_from([bytes, bytearray, memoryview])
expectations = st.sampled_from([-1, -(2**70), 0, 7, OFFSET_MAX, OFFSET_MAX + 1, U64_MAX]) | numbers


# ---- arguments ----


class ForeignMapping(Mapping[str, str]):
    """A mapping that is not a dict and returns whatever items it was given."""

    def __init__(self, items: Sequence[Any], on_items: Callable[[], object] = bool) -> None:
        self._items = items
        self._on_items = on_items

    def __getitem__(self, key: str) -> str:
        return str(dict(self._items)[key])

    def __iter__(self) -> Iterator[str]:
        return iter(dict(self._items))

    def __len__(self) -> int:
        return len(self._items)

    def items(self) -> Any:
        self._on_items()
        return self._items
