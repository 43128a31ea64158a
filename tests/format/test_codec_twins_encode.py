"""Encoding one message or many: both twins of the codec return and raise the same."""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.format import pure
from forebay.format.frame import encode_frame, scan
from forebay.format.message import (
    MessageId,
    StreamMessage,
    decode_messages,
    encode_head,
    encode_message,
    encode_middle,
)
from forebay.limits import MESSAGE_BYTES_MAX, OFFSET_MAX
from support.codec_twins import U64_MAX, ForeignMapping, buffer_types, native, numbers, same


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
    same("encode_many", b"h", b"m", offset, payloads, index, 5, attributes, keys, bytes_max, None)


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
    same("encode_many", b"h", b"m", 0, payloads, 0, time, attributes, keys, bytes_max, None)


@given(
    sizes=st.lists(st.integers(0, 3000), min_size=1, max_size=60), bytes_max=st.integers(0, 9**5)
)
def test_batches_of_unequal_messages_are_cut_the_same(sizes: list[int], bytes_max: int) -> None:
    payloads = [b"x" * size for size in sizes]
    result = same("encode_many", b"h", b"m", 0, payloads, 0, 5, None, None, bytes_max, None)
    assert isinstance(result, tuple)
    assert result[1] >= 1


@pytest.mark.parametrize(("spare", "index"), [(-1, 1), (0, 2), (1, 2)])
def test_a_batch_may_be_exactly_as_large_as_asked(spare: int, index: int) -> None:
    frame = len(pure.encode_one(b"h", b"m", 0, b"payload", 5, None, None))
    args = (b"h", b"m", 0, [b"payload"] * 4, 0, 5, None, None, 2 * frame + spare, None)
    result = same("encode_many", *args)
    assert isinstance(result, tuple)
    assert result[1] == index


@given(
    head=st.binary(max_size=24),
    payloads=payload_lists,
    index=st.integers(0, 3),
    request_id=any_times | st.just("1") | st.integers(0, U64_MAX),
    bytes_max=st.sampled_from([0, 2**20]) | st.integers(0, 1500),
)
def test_numbered_messages_encode_the_same(
    head: bytes, payloads: Any, index: int, request_id: Any, bytes_max: int
) -> None:
    same("encode_many", head, b"m", 0, payloads, index, 5, None, None, bytes_max, request_id)


@pytest.mark.parametrize("twin", [pure, native])
def test_the_request_ids_of_numbered_messages_follow_each_other(twin: Any) -> None:
    head, middle = encode_head(0, 7, "/default/t", ""), encode_middle("p", None)
    frames, index = twin.encode_many(
        head, middle, 5, [b"a", b"b", b"c"], 1, 9, None, None, 2**20, U64_MAX - 1
    )
    assert index == 3
    found = list(decode_messages(scan(frames, expected=5, consecutive=True)))
    assert [each.request_id for each in found] == [U64_MAX - 1, U64_MAX]
    assert [(each.msg_id.producer_id, each.payload) for each in found] == [(7, b"b"), (7, b"c")]


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


def test_both_twins_say_the_same_of_what_is_wrong() -> None:
    bad: list[tuple[str, tuple[object, ...]]] = [
        ("encode_one", (b"", b"", -1, b"", 0, None, None)),
        ("encode_one", (b"", b"", 0, b"", 2**64, None, None)),
        ("encode_one", (b"", b"", 0, bytes(MESSAGE_BYTES_MAX), 0, None, None)),
        ("encode_one", (b"", b"", 0, b"", 0, dict.fromkeys(map(str, range(2000)), ""), None)),
        ("encode_many", (b"", b"", OFFSET_MAX, [b"", b""], 0, 0, None, None, 999, None)),
        ("encode_many", (b"1234567", b"", 0, [b""], 0, 0, None, None, 999, 0)),
        ("encode_many", (bytes(8), b"", 0, [b"", b""], 0, 0, None, None, 999, U64_MAX)),
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
