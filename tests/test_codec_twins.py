"""The plain codec and its compiled twin answer the same, and raise the same, for everything."""

from __future__ import annotations

import struct
import sys
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import Any, Final
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import MessageTooLarge
from forebay.format import pure
from forebay.format.frame import encode_frame
from forebay.format.layout import FIXED, VARINT, Buffer
from forebay.format.message import (
    MessageId,
    StreamMessage,
    encode_head,
    encode_message,
    encode_middle,
)
from forebay.limits import (
    ATTRIBUTES_MAX,
    FRAME_PAYLOAD_BYTES_MAX,
    FRAME_PAYLOAD_BYTES_MIN,
    MESSAGE_BYTES_MAX,
    OFFSET_MAX,
)

_native: Any = pytest.importorskip(
    "forebay.format._native", reason="the compiled twin of the codec was not built"
)


def _encode_one(head: Any, middle: Any, offset: Any, *rest: Any) -> bytes:
    """A frame by way of a run: the compiled twin makes single frames only there."""
    run = pure.new_run()
    assert _native.append_one(run, offset, head, middle, *rest) == offset
    return bytes(pure.run_frames(run))


native: Any = SimpleNamespace(
    scan=_native.scan,
    columns=_native.columns,
    append_one=_native.append_one,
    encode_many=_native.encode_many,
    encode_one=_encode_one,
)

HEADER_BYTES: Final = pure.HEADER.size
U64_MAX: Final = 2**64 - 1
ANY_ORDER: Final = False
CONSECUTIVE: Final = True

# ---- the comparison ----


def outcome(function: Callable[..., Any], *args: object) -> object:
    """The answer with its columns as bytes, or the type of the exception."""
    try:
        answer = function(*args)
    except Exception as error:  # noqa: BLE001 - which one it is is the point
        return type(error)
    if isinstance(answer, tuple):
        return tuple(bytes(part) if isinstance(part, memoryview) else part for part in answer)
    return answer


def same(name: str, *args: object) -> object:
    """What both twins answer, once they are known to agree."""
    plain = outcome(getattr(pure, name), *args)
    assert outcome(getattr(native, name), *args) == plain
    return plain


def same_columns_of(buffer: Buffer) -> None:
    """Of all frames, and of each one alone: the columns stop at the first that is no message."""
    _, positions, lengths, *_ = pure.scan(buffer, 0, -1, ANY_ORDER)
    same("columns", buffer, positions, lengths)
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

# ---- scan and columns ----


@given(log=logs(), kind=buffer_types, expected=expectations, consecutive=st.booleans())
def test_valid_frames_scan_the_same(
    log: bytes, kind: Callable[[bytes], Buffer], expected: int, consecutive: bool
) -> None:
    same("scan", kind(log), 0, expected, consecutive)
    same("scan", kind(log), 0, -1, consecutive)
    if log:
        first = pure.HEADER.unpack_from(log)[0]
        same("scan", kind(log), 0, first, consecutive)
    same_columns_of(kind(log))


@given(log=logs(), kind=buffer_types, start=st.integers(-2, 200), consecutive=st.booleans())
def test_any_start_scans_the_same(
    log: bytes, kind: Callable[[bytes], Buffer], start: int, consecutive: bool
) -> None:
    same("scan", kind(log), start, -1, consecutive)


@given(log=logs(st.binary(min_size=10, max_size=30)), consecutive=st.booleans())
def test_a_log_torn_at_every_byte_scans_the_same(log: bytes, consecutive: bool) -> None:
    for cut in range(len(log) + 1):
        answer = same("scan", log[:cut], 0, -1, consecutive)
        assert isinstance(answer, tuple)


@given(message=messages(), kind=buffer_types)
def test_a_message_torn_at_every_byte_is_located_the_same(
    message: bytes, kind: Callable[[bytes], Buffer]
) -> None:
    for cut in range(len(message) + 1):
        positions, lengths = array("Q", [0]), array("I", [cut])
        same("columns", kind(message), memoryview(positions), memoryview(lengths))
        same("columns", kind(message[:cut]), memoryview(positions), memoryview(lengths))


@given(data=st.data(), kind=buffer_types, expected=expectations, consecutive=st.booleans())
def test_damaged_frames_scan_the_same(
    data: st.DataObject, kind: Callable[[bytes], Buffer], expected: int, consecutive: bool
) -> None:
    buffer = kind(data.draw(damage(data.draw(logs()))))
    same("scan", buffer, 0, expected, consecutive)
    same("scan", buffer, 0, -1, consecutive)
    same_columns_of(buffer)


@given(data=st.data(), kind=buffer_types)
def test_damaged_messages_are_located_the_same(
    data: st.DataObject, kind: Callable[[bytes], Buffer]
) -> None:
    damaged = data.draw(damage(data.draw(messages())))
    one = memoryview(array("Q", [0])), memoryview(array("I", [len(damaged)]))
    same("columns", kind(damaged), *one)
    same_columns_of(kind(encode_frame(1, damaged)))


@given(
    noise=st.binary(max_size=200) | st.lists(st.sampled_from([0, 1, 2, 250, 251, 252])).map(bytes)
)
def test_noise_is_located_the_same(noise: bytes) -> None:
    same("columns", noise, array("Q", [0]), array("I", [len(noise)]))


@given(
    log=logs(),
    positions=st.lists(st.integers(0, 150) | st.integers(0, U64_MAX), max_size=4),
    lengths=st.lists(st.integers(0, 150) | st.integers(0, 2**32 - 1), max_size=4),
    kind=buffer_types,
)
def test_any_positions_and_lengths_are_located_or_refused_the_same(
    log: bytes, positions: list[int], lengths: list[int], kind: Callable[[bytes], Buffer]
) -> None:
    same("columns", kind(log), memoryview(array("Q", positions)), memoryview(array("I", lengths)))


@given(positions=st.binary(max_size=20), lengths=st.binary(max_size=12))
def test_columns_of_partial_items_are_refused_the_same(positions: bytes, lengths: bytes) -> None:
    same("columns", bytes(40), positions, lengths)


@pytest.mark.parametrize(
    ("positions", "lengths"),
    [([0, 0], [5]), ([0], []), ([11], [0]), ([5], [6]), ([U64_MAX], [1]), ([0], [2**32 - 1])],
)
def test_rows_outside_the_buffer_or_of_unequal_count_are_a_value_error(
    positions: list[int], lengths: list[int]
) -> None:
    assert same("columns", bytes(10), array("Q", positions), array("I", lengths)) is ValueError


@pytest.mark.parametrize(
    ("fixed_topic", "varint_topic", "flavour"),
    [(b"x", b"y", FIXED), (b"/", b"/", FIXED), (b"/", b"y", FIXED), (b"x", b"/", VARINT)],
)
def test_a_message_that_reads_both_ways_goes_to_the_rooted_topic(
    fixed_topic: bytes, varint_topic: bytes, flavour: int
) -> None:
    # The payload holds the end of the varint reading, whose routing key takes the fixed one's end:
    # time, producer name, subscription, attributes.
    payload = bytes(9) + b"\1\x19"
    end = fixed(0) + fixed(0) + b"\0" + fixed(0)
    start = fixed(0) + fixed(1) + fixed_topic + fixed(0) + fixed(0) + fixed(len(payload))
    # The first eight bytes are the fixed reading's request id; the varint reading's topic begins
    # in them and takes all up to the payload.
    ids = b"\0\0" + b"\xfb" + struct.pack("<H", 3 + len(start)) + varint_topic + b"zz"
    message = ids + start + payload + end
    rows = array("Q", [0]), array("I", [len(message)])
    answer = same("columns", message, *rows)
    assert isinstance(answer, tuple)
    assert answer[-2:] == (bytes([flavour]), -1)


@pytest.mark.parametrize(("version", "bad"), [(2**32 - 1, -1), (2**32, 0)])
def test_a_schema_version_over_32_bits_is_no_message(version: int, bad: int) -> None:
    message = bytes(10) + b"\0\1" + struct.pack("<BQ", 253, version)
    answer = same("columns", message, array("Q", [0]), array("I", [len(message)]))
    assert isinstance(answer, tuple)
    assert answer[-1] == bad


@pytest.mark.parametrize(("mark", "width"), [(250, 0), (251, 2), (252, 4), (253, 8)])
def test_a_varint_has_the_width_of_its_mark(mark: int, width: int) -> None:
    message = bytes([mark]) + bytes(width + 9)
    answer = same("columns", message, array("Q", [0]), array("I", [len(message)]))
    assert isinstance(answer, tuple)
    assert answer[-1] == -1


@pytest.mark.parametrize("mark", [254, 255])
@pytest.mark.parametrize("width", [0, 1, 2, 4, 8, 16])
def test_a_varint_over_64_bits_is_no_message(mark: int, width: int) -> None:
    message = bytes([mark]) + bytes(width + 9)
    answer = same("columns", message, array("Q", [0]), array("I", [len(message)]))
    assert isinstance(answer, tuple)
    assert answer[-1] == 0


@pytest.mark.parametrize("at", [8, 10, 11, 12])
@pytest.mark.parametrize("tag", [0, 1, 2, 255])
def test_a_tag_is_zero_or_one(at: int, tag: int) -> None:
    message = bytearray(13)  # varint, all fields absent or empty
    message[at : at + 1] = [tag, 0] if tag == 1 else [tag]
    answer = same("columns", message, array("Q", [0]), array("I", [len(message)]))
    assert isinstance(answer, tuple)
    assert answer[-1] == (-1 if tag <= 1 else 0)


def test_buffers_that_are_large_enough_to_be_read_unlocked_give_the_same() -> None:
    message = encode_message(StreamMessage(b"x" * 100, msg_id=MessageId(1, "/default/t")), 0)
    log = b"".join(encode_frame(offset, message) for offset in range(3000))
    for whole in (log, log[:-1], log[:-50] + bytes(50)):
        _, positions, lengths, *_ = pure.scan(whole, 0, 0, CONSECUTIVE)
        same("scan", whole, 0, 0, CONSECUTIVE)
        same("columns", whole, positions, lengths)
        same("columns", whole, positions, memoryview(array("I", [*lengths[:-1], 9])))


@pytest.mark.parametrize(
    ("length", "end"),
    [
        (FRAME_PAYLOAD_BYTES_MIN - 1, pure.BAD_LENGTH),
        (FRAME_PAYLOAD_BYTES_MIN, pure.TORN),
        (FRAME_PAYLOAD_BYTES_MAX, pure.TORN),
        (FRAME_PAYLOAD_BYTES_MAX + 1, pure.BAD_LENGTH),
    ],
)
def test_the_limits_of_a_frame_are_the_same(length: int, end: int) -> None:
    answer = same("scan", pure.HEADER.pack(5, length, 0), 0, -1, CONSECUTIVE)
    assert answer == (b"", b"", b"", 0, end, 5)


@pytest.mark.parametrize(
    ("offset", "end"), [(OFFSET_MAX, pure.COMPLETE), (OFFSET_MAX + 1, pure.BAD_OFFSET)]
)
def test_the_limit_of_offsets_is_the_same(offset: int, end: int) -> None:
    answer = same("scan", encode_frame(offset, bytes(10)), 0, -1, CONSECUTIVE)
    assert isinstance(answer, tuple)
    assert answer[-2:] == (end, OFFSET_MAX + 1)


@pytest.mark.parametrize("start", [-1, 11, 2**63, 2**64, -(2**64)])
def test_a_start_outside_the_buffer_is_a_value_error(start: int) -> None:
    assert same("scan", bytes(10), start, -1, ANY_ORDER) is ValueError


def test_what_is_no_contiguous_buffer_is_refused_the_same() -> None:
    assert same("scan", memoryview(bytes(40))[::2], 0, -1, ANY_ORDER) is BufferError
    assert same("scan", "text", 0, -1, ANY_ORDER) is TypeError
    assert same("scan", bytes(40), 0.5, -1, ANY_ORDER) is TypeError
    assert same("columns", memoryview(bytes(40))[::2], b"", b"") is BufferError
    assert same("scan", bytes(40), 0, 2**64, ANY_ORDER) is ValueError


def test_a_memoryview_of_wider_items_is_read_as_its_bytes() -> None:
    log = encode_frame(3, bytes(16))
    wide = memoryview(log).cast("Q")
    assert same("scan", wide, 0, 3, CONSECUTIVE) == same("scan", log, 0, 3, CONSECUTIVE)
    assert same("encode_one", b"", b"", 0, wide, 0, None, None) == same(
        "encode_one", b"", b"", 0, log, 0, None, None
    )


# ---- encode ----


class ForeignMapping(Mapping[str, str]):
    """A mapping that is no dict, and answers whatever items it was given."""

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


class ForeignSequence(Sequence[Any]):
    def __init__(self, items: Sequence[Any]) -> None:
        self._items = items

    def __getitem__(self, index: Any) -> Any:
        return self._items[index]

    def __len__(self) -> int:
        return len(self._items)


class Text(str):
    __slots__ = ()


good_texts = st.text(max_size=20) | st.text(max_size=5).map(Text)
any_texts: st.SearchStrategy[Any] = st.one_of(
    good_texts, st.sampled_from(["\ud800", "a\udfff", b"raw", 5, None])
)
any_offsets = st.sampled_from([0, 1, OFFSET_MAX, OFFSET_MAX + 1, U64_MAX, 2**70, -1, True])
any_times = st.sampled_from([0, 1_700_000_000_000, U64_MAX, 2**64, -1, -(2**70)])
good_payloads: st.SearchStrategy[Any] = st.builds(
    lambda kind, raw: kind(raw), buffer_types, st.binary(max_size=300)
)
any_payloads = st.one_of(
    good_payloads, st.sampled_from(["text", 5, None, memoryview(bytes(9))[::2], array("I", [1])])
)
mapping_types: st.SearchStrategy[Callable[[dict[str, str]], Any]] = st.sampled_from(
    [dict, OrderedDict, MappingProxyType, lambda pairs: ForeignMapping(list(pairs.items()))]
)


def attributes_of(texts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    pairs = st.dictionaries(texts, texts, max_size=4)
    return st.none() | st.builds(lambda kind, items: kind(items), mapping_types, pairs)


good_attributes, any_attributes = attributes_of(good_texts), attributes_of(any_texts)
odd_attributes = st.sampled_from(
    [
        [("a", "b")],
        "ab",
        7,
        ForeignMapping([("a", "b", "c")]),
        ForeignMapping([["a", "b"]]),
        ForeignMapping(["ab", "xyz"]),
        ForeignMapping([5]),
        ForeignMapping([(5, "a"), 5]),
    ]
)


@given(
    head=st.binary(max_size=40),
    middle=st.binary(max_size=40),
    offset=any_offsets | st.integers(0, OFFSET_MAX),
    payload=good_payloads,
    time=any_times | st.integers(0, U64_MAX),
    attributes=good_attributes,
    key=st.none() | good_texts,
)
def test_one_message_encodes_the_same(
    head: bytes, middle: bytes, offset: int, payload: Any, time: int, attributes: Any, key: Any
) -> None:
    same("encode_one", head, middle, offset, payload, time, attributes, key)


@given(
    offset=any_offsets,
    payload=any_payloads,
    time=any_times,
    attributes=any_attributes | odd_attributes,
    key=st.none() | any_texts,
)
def test_one_bad_message_is_refused_the_same(
    offset: int, payload: Any, time: int, attributes: Any, key: Any
) -> None:
    same("encode_one", b"head", b"middle", offset, payload, time, attributes, key)


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ({"offset": -1}, ValueError),
        ({"offset": OFFSET_MAX + 1}, ValueError),
        ({"offset": "0"}, TypeError),
        ({"publish_time": -1}, ValueError),
        ({"publish_time": 2**64}, ValueError),
        ({"payload": "text"}, TypeError),
        ({"payload": None}, TypeError),
        ({"payload": memoryview(bytes(9))[::2]}, BufferError),
        ({"attributes": {"a": 5}}, TypeError),
        ({"attributes": {b"a": "b"}}, TypeError),
        ({"attributes": {"a": "\ud800"}}, UnicodeEncodeError),
        ({"attributes": MappingProxyType({"\ud800": "a"})}, UnicodeEncodeError),
        ({"attributes": [("a", "b")]}, AttributeError),
        ({"routing_key": b"key"}, TypeError),
        ({"routing_key": "\udfff"}, UnicodeEncodeError),
    ],
)
def test_each_bad_argument_has_its_exception(bad: dict[str, Any], error: type[Exception]) -> None:
    good = {"offset": 0, "payload": b"", "publish_time": 0, "attributes": None, "routing_key": None}
    assert same("encode_one", b"", b"", *(good | bad).values()) is error


payload_lists: st.SearchStrategy[Any] = st.builds(
    lambda kind, items: kind(items),
    st.sampled_from([list, tuple, deque, ForeignSequence]),
    st.lists(good_payloads, max_size=6),
)


@given(
    payloads=payload_lists,
    offset=st.sampled_from([0, 9, OFFSET_MAX - 2, OFFSET_MAX, OFFSET_MAX + 1, -1]),
    index=st.integers(-1, 8),
    attributes=st.none() | st.lists(good_attributes, min_size=4, max_size=8) | st.just(()),
    keys=st.none() | st.lists(st.none() | good_texts, min_size=4, max_size=8).map(tuple),
    bytes_max=st.sampled_from([0, -1, -(2**70), 2**20, 2**63, 2**70]) | st.integers(0, 1500),
)
def test_many_messages_encode_the_same(
    payloads: Any, offset: int, index: int, attributes: Any, keys: Any, bytes_max: int
) -> None:
    same("encode_many", b"h", b"m", offset, payloads, index, 5, attributes, keys, bytes_max)


@given(
    payloads=st.lists(any_payloads, max_size=3),
    attributes=st.none() | st.lists(any_attributes | odd_attributes, min_size=2, max_size=3),
    keys=st.none() | st.lists(st.none() | any_texts, min_size=2, max_size=3),
    time=any_times,
    bytes_max=st.integers(0, 400),
)
def test_many_bad_messages_are_refused_the_same(
    payloads: Any, attributes: Any, keys: Any, time: int, bytes_max: int
) -> None:
    same("encode_many", b"h", b"m", 0, payloads, 0, time, attributes, keys, bytes_max)


@given(
    sizes=st.lists(st.integers(0, 3000), min_size=1, max_size=60), bytes_max=st.integers(0, 9**5)
)
def test_batches_of_unequal_messages_are_cut_the_same(sizes: list[int], bytes_max: int) -> None:
    payloads = [b"x" * size for size in sizes]
    answer = same("encode_many", b"h", b"m", 0, payloads, 0, 5, None, None, bytes_max)
    assert isinstance(answer, tuple)
    assert answer[1] >= 1


@pytest.mark.parametrize(("spare", "index"), [(-1, 1), (0, 2), (1, 2)])
def test_a_batch_may_be_exactly_as_large_as_asked(spare: int, index: int) -> None:
    frame = len(pure.encode_one(b"h", b"m", 0, b"payload", 5, None, None))
    args = (b"h", b"m", 0, [b"payload"] * 4, 0, 5, None, None, 2 * frame + spare)
    answer = same("encode_many", *args)
    assert isinstance(answer, tuple)
    assert answer[1] == index


texts = st.text(max_size=10)


@given(
    payload=st.binary(max_size=300),
    offset=st.integers(0, OFFSET_MAX),
    request=numbers,
    producer=st.tuples(numbers, texts, texts, texts),
    subscription=st.none() | texts,
    time=numbers,
    attributes=st.dictionaries(texts, texts, max_size=20),
    key=st.none() | texts,
)
def test_one_message_is_the_frame_of_the_message(
    payload: bytes,
    offset: int,
    request: int,
    producer: tuple[int, str, str, str],
    subscription: str | None,
    time: int,
    attributes: dict[str, str],
    key: str | None,
) -> None:
    producer_id, topic, broker, name = producer
    message = StreamMessage(
        payload,
        request,
        MessageId(producer_id, topic, broker),
        time,
        name,
        subscription,
        attributes,
        routing_key=key,
    )
    head = encode_head(request, producer_id, topic, broker)
    middle = encode_middle(name, subscription)
    encoded = same("encode_one", head, middle, offset, payload, time, attributes, key)
    assert encoded == encode_frame(offset, encode_message(message, offset))


@pytest.mark.parametrize("count", [16, 17, ATTRIBUTES_MAX, ATTRIBUTES_MAX + 1])
@pytest.mark.parametrize("kind", [dict, MappingProxyType])
def test_the_limit_of_attributes_is_the_same(count: int, kind: Callable[[Any], Any]) -> None:
    attributes = kind({f"ключ {number}": str(number) for number in range(count)})
    answer = same("encode_one", b"", b"", 0, b"", 0, attributes, None)
    assert (answer is MessageTooLarge) == (count > ATTRIBUTES_MAX)
    twice = same("encode_many", b"", b"", 0, [b"", b""], 0, 0, [attributes, {"a": "b"}], None, 9**9)
    assert (twice is MessageTooLarge) == (count > ATTRIBUTES_MAX)


def test_the_limit_of_a_message_is_the_same() -> None:
    around = len(native.encode_one(b"h", b"m", 0, b"", 0, None, None)) - HEADER_BYTES
    largest = bytes(MESSAGE_BYTES_MAX - around)
    assert isinstance(same("encode_one", b"h", b"m", 0, largest, 0, None, None), bytes)
    assert same("encode_one", b"h", b"m", 0, largest + b"\0", 0, None, None) is MessageTooLarge


def test_both_twins_say_the_same_of_what_is_wrong() -> None:
    bad: list[tuple[str, tuple[object, ...]]] = [
        ("encode_one", (b"", b"", -1, b"", 0, None, None)),
        ("encode_one", (b"", b"", 0, b"", 2**64, None, None)),
        ("encode_one", (b"", b"", 0, bytes(MESSAGE_BYTES_MAX), 0, None, None)),
        ("encode_one", (b"", b"", 0, b"", 0, dict.fromkeys(map(str, range(2000)), ""), None)),
        ("encode_many", (b"", b"", OFFSET_MAX, [b"", b""], 0, 0, None, None, 999)),
        ("columns", (b"", bytes(8), b"")),
        ("columns", (b"", bytes(8), b"\1\0\0\0")),
    ]
    for name, args in bad:
        said = []
        for twin in (pure, native):
            with pytest.raises(ValueError) as caught:  # noqa: PT011 - compared below
                getattr(twin, name)(*args)
            said.append(str(caught.value))
        assert said[0] == said[1]


# ---- arguments that change while they are read ----


@pytest.mark.parametrize("twin", [pure, native])
def test_a_list_emptied_in_mid_batch_ends_the_batch(twin: Any) -> None:
    payloads = [b"%d" % number * 200 for number in range(5)]
    attributes = [None, None, ForeignMapping([("a", "b")], payloads.clear), None, None]
    frames, index = twin.encode_many(b"h", b"m", 0, payloads, 0, 0, attributes, None, 9**9)
    assert index == 3
    assert len(pure.scan(frames, 0, 0, CONSECUTIVE)[0]) == 3


@pytest.mark.parametrize("twin", [pure, native])
def test_a_payload_cannot_be_resized_while_it_is_encoded(twin: Any) -> None:
    payload = bytearray(100)
    attributes = ForeignMapping([("a", "b")], payload.clear)
    with pytest.raises(BufferError):
        twin.encode_one(b"h", b"m", 0, payload, 0, attributes, None)
    with pytest.raises(BufferError):
        twin.encode_many(b"h", b"m", 0, [payload], 0, 0, [attributes], None, 9**9)
    payload.clear()


def test_attributes_replaced_in_mid_batch_are_read_as_they_are_then() -> None:
    def outcome_of(twin: Any) -> Any:
        later = {"a": "b"}
        first = ForeignMapping([("x", "y")], lambda: later.update(a="long" * 500, c="d"))
        return twin.encode_many(b"", b"", 0, [b"", b""], 0, 0, [first, later], None, 9**9)

    assert outcome_of(native) == outcome_of(pure)


# ---- what the twin keeps ----


def test_the_compiled_twin_keeps_no_reference() -> None:
    payload, key, buffer = bytes(300), "key" * 9, bytearray(encode_frame(0, bytes(40)))
    pairs = {"a" * 9: "b" * 9}
    calls: list[tuple[Callable[..., Any], tuple[object, ...]]] = [
        (native.encode_one, (b"", b"", 0, payload, 0, pairs, key)),
        (native.encode_one, (b"", b"", 0, payload, 0, MappingProxyType(pairs), 5)),
        (native.encode_many, (b"", b"", 0, [payload] * 3, 0, 0, [pairs] * 3, (key,) * 3, 700)),
        (native.encode_many, (b"", b"", 0, [payload, "no"], 0, 0, None, None, 700)),
        (native.scan, (buffer, 0, -1, CONSECUTIVE)),
        (native.columns, (buffer, array("Q", [16]), array("I", [40]))),
        (native.columns, (buffer, array("Q", [16]), array("I", [90]))),
    ]
    watched = [payload, key, pairs, buffer, *pairs, *pairs.values(), MessageTooLarge]
    before = [sys.getrefcount(thing) for thing in watched]
    for function, args in calls * 50:
        outcome(function, *args)
    assert [sys.getrefcount(thing) for thing in watched] == before
    buffer.clear()


@pytest.mark.parametrize("name", ["scan", "columns", "append_one", "encode_many"])
def test_a_wrong_count_of_arguments_is_a_type_error(name: str) -> None:
    assert same(name) is TypeError
    assert same(name, *range(12)) is TypeError


@given(st.binary(max_size=1200))
def test_checksums_are_those_of_zlib(raw: bytes) -> None:
    frame = native.encode_one(raw, b"", 0, b"", 0, None, None)
    assert pure.HEADER.unpack_from(frame)[2] == crc32(frame[HEADER_BYTES:])


# ---- runs that grow ----


def test_a_run_grows_alike_in_both_twins() -> None:
    runs = pure.new_run(), pure.new_run()
    for number in range(300):
        args = (7, b"head", b"middle", bytes(number), number, {"k": str(number)}, None)
        offsets = pure.append_one(runs[0], *args), native.append_one(runs[1], *args)
        assert offsets == (7 + number, 7 + number)
    assert runs[0] == runs[1]
    assert pure.run_count(runs[1]) == 300
    assert list(pure.scan(pure.run_frames(runs[1]), 0, 7, CONSECUTIVE)[0]) == list(range(7, 307))


@pytest.mark.parametrize("twin", [pure, native])
def test_bytes_behind_the_count_do_not_exist(twin: Any) -> None:
    run, clean = pure.new_run(), pure.new_run()
    for target in (run, clean):
        twin.append_one(target, 0, b"h", b"m", b"first", 0, None, None)
    run += b"what an interrupted append left"
    assert bytes(pure.run_frames(run)) == bytes(pure.run_frames(clean))
    for target in (run, clean):
        assert twin.append_one(target, 0, b"h", b"m", b"second", 0, None, None) == 1
    assert run == clean


@pytest.mark.parametrize(
    "run",
    [
        b"",
        bytearray(),
        bytearray(15),
        bytearray(16),
        bytearray(pure.RUN_PREFIX.pack(0, 17)),
        bytearray(pure.RUN_PREFIX.pack(OFFSET_MAX, 16)),
        bytearray(pure.RUN_PREFIX.pack(U64_MAX, 16)),
    ],
)
def test_what_is_no_run_is_refused_alike(run: Any) -> None:
    answer = same("append_one", run, 1, b"h", b"m", b"payload", 0, None, None)
    assert answer in (TypeError, ValueError)


@pytest.mark.parametrize("twin", [pure, native])
def test_a_refused_message_leaves_the_run_as_it_was(twin: Any) -> None:
    run = pure.new_run()
    twin.append_one(run, 0, b"h", b"m", b"first", 0, None, None)
    before = bytes(run)
    for bad in ({"payload": "text"}, {"time": -1}, {"key": 5}, {"attributes": {"a": 5}}):
        parts: dict[str, Any] = {"payload": b"", "time": 0, "attributes": None, "key": None} | bad
        with pytest.raises((TypeError, ValueError)):
            twin.append_one(run, 0, b"h", b"m", *parts.values())
        assert bytes(run) == before
    view = memoryview(run)
    with pytest.raises(BufferError):
        twin.append_one(run, 0, b"h", b"m", b"second", 0, None, None)
    view.release()
    assert bytes(run) == before


@pytest.mark.parametrize("twin", [pure, native])
def test_a_run_that_changes_under_an_append_is_refused(twin: Any) -> None:
    run = pure.new_run()
    meddler = ForeignMapping(
        [("a", "b")], lambda: pure.append_one(run, 0, b"h", b"m", b"other", 0, None, None)
    )
    with pytest.raises(ValueError, match="changed"):
        twin.append_one(run, 0, b"h", b"m", b"payload", 0, meddler, None)
    assert pure.run_count(run) == 1
