"""Outlines of descriptors, which plans over very many objects read."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import DescriptorError
from forebay.format.descriptor import (
    ObjectDescriptor,
    decode_descriptor,
    decode_outline,
    encode_descriptor,
)
from forebay.limits import OFFSET_MAX

texts = st.one_of(
    st.none(),
    st.from_regex(r"[0-9a-f]{1,32}", fullmatch=True),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
)


@st.composite
def descriptors(draw: st.DrawFn) -> ObjectDescriptor:
    start = draw(st.integers(0, OFFSET_MAX - 1000))
    steps = draw(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=40))
    index, offset, position = [(start, 0)], start, 0
    for messages, size in steps:
        offset, position = offset + messages, position + size
        index.append((offset, position))
    name = draw(st.sampled_from(["data-1-2.dnb1", "x", "ключ", 'a"b', "a b"]))
    return ObjectDescriptor(
        name,
        start,
        offset + draw(st.integers(0, 5)),
        position + draw(st.integers(1, 99)),
        draw(texts),
        draw(st.integers(0, OFFSET_MAX)),
        draw(st.booleans()),
        draw(st.sampled_from([None, (), tuple(index)])),
        draw(st.sampled_from([None, "sha256:" + "0f" * 32])),
        draw(st.none() | st.integers(0, OFFSET_MAX)),
        draw(st.none() | st.integers(0, OFFSET_MAX)),
        draw(st.sampled_from([None, "zstd"])),
        draw(st.sampled_from([None, "pulsar"])),
        draw(st.sampled_from([None, (("id", 7), ("uuid", "a-b"))])),
    )


@given(descriptors(), st.integers(0, 60))
def test_an_outline_is_the_descriptor_with_less_of_its_index(
    descriptor: ObjectDescriptor, entries: int
) -> None:
    found = decode_outline(encode_descriptor(descriptor), entries)
    assert replace(found, offset_index=None) == replace(descriptor, offset_index=None)
    taken, whole = found.offset_index or (), descriptor.offset_index or ()
    assert len(taken) <= entries + 1
    assert list(taken) == [entry for entry in whole if entry in taken]
    assert not taken or taken[0] == whole[0]
    if entries == 0:
        assert found.offset_index is None


@pytest.mark.parametrize("new", [False, True], ids=["old", "new"])
def test_the_outline_of_the_usual_form_is_decoded_without_its_json(
    new: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    descriptor = ObjectDescriptor(
        "data-0-9.dnb1", 0, 9, 900, "9a", 7, offset_index=((0, 0), (5, 400))
    )
    if new:
        descriptor = replace(
            descriptor,
            content_hash="sha256:" + "0f" * 32,
            highest_publish_time=1_700_000_000_000,
            raw_size=2000,
            codec="zstd",
            format="dnb1",
        )
    data = encode_descriptor(descriptor)
    monkeypatch.setattr(json, "loads", lambda _: pytest.fail("the JSON was decoded"))
    assert decode_outline(data, 1) == descriptor
    assert decode_outline(data) == replace(descriptor, offset_index=None)


@given(descriptors(), st.integers(0, 9))
def test_other_spellings_give_the_same_outline(descriptor: ObjectDescriptor, entries: int) -> None:
    body = json.loads(encode_descriptor(descriptor))
    spelled = json.dumps(body, indent=1).encode()
    outline = replace(decode_outline(spelled, entries), offset_index=None)
    assert outline == replace(decode_descriptor(spelled), offset_index=None)


def test_entries_are_taken_evenly() -> None:
    index = tuple((1000 * number, 10_000 * number) for number in range(1000))
    descriptor = ObjectDescriptor("x.dnb1", 0, 10**6, 10**7, None, 0, offset_index=index)
    found = decode_outline(encode_descriptor(descriptor), 9).offset_index
    assert found is not None
    assert len(found) == 10
    # Evenly by position in the text, where later entries have more digits.
    for number, (_, position) in enumerate(found):
        assert abs(position - number * 10**6) < 3 * 10**5


@given(descriptors(), st.data())
def test_what_is_no_descriptor_has_no_outline(
    descriptor: ObjectDescriptor, data: st.DataObject
) -> None:
    raw = bytearray(encode_descriptor(descriptor))
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] = data.draw(st.integers(0, 255))
    try:
        outline = decode_outline(bytes(raw))
    except DescriptorError:
        with pytest.raises(DescriptorError):
            decode_descriptor(bytes(raw))
        return
    if descriptor.offset_index is None:  # else the damage may be where an outline does not look
        assert outline == replace(decode_descriptor(bytes(raw)), offset_index=None)


def test_the_outline_of_a_ledger_has_what_is_known_of_it() -> None:
    ledger = (("block_bytes", 1024), ("id", 1 << 40), ("index_bytes", 300), ("uid", "7f-0e"))
    whole = ObjectDescriptor(
        "7f0e0d1c-0b0a-4009-8807-060504030201-ledger-42",
        5,
        14,
        700,
        "etag",
        1_700_000_000,
        offset_index=((5, 0), (9, 300)),
        raw_size=500,
        format="pulsar",
        ledger=ledger,
    )
    assert decode_outline(encode_descriptor(whole)) == replace(whole, offset_index=None)
    assert decode_outline(encode_descriptor(whole), 4).ledger == ledger
    odd = replace(whole, ledger=(("text", 'a "quoted" {brace}'),))
    assert decode_outline(encode_descriptor(odd)).ledger == odd.ledger
