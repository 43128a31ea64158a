"""Rows of subscriptions: what was written comes back, and stays within the limits."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.errors import DescriptorError, UsageError
from forebay.format.subscription import (
    ConsumerRow,
    SubscriptionRow,
    decode_subscription,
    encode_subscription,
)
from forebay.limits import (
    CONSUMER_FILTER_BYTES_MAX,
    CONSUMER_FILTERS_MAX,
    CONSUMER_NAME_BYTES_MAX,
    OFFSET_MAX,
    SUBSCRIPTION_BYTES_MAX,
    SUBSCRIPTION_CONSUMERS_MAX,
    SUBSCRIPTION_NAME_BYTES_MAX,
)
from support.paths import ROOT

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
CONSUMERS = st.lists(
    st.builds(
        ConsumerRow,
        id=st.integers(0, 2**64 - 1),
        name=TEXT,
        filters=st.lists(TEXT.filter(bool), max_size=4).map(tuple),
        seen_ms=st.integers(0, OFFSET_MAX),
    ),
    max_size=6,
    unique_by=lambda each: each.id,
)


@settings(max_examples=60)
@given(
    name=TEXT.filter(bool),
    kind=st.integers(0, 3),
    created=st.integers(0, OFFSET_MAX),
    consumers=CONSUMERS,
)
def test_a_row_comes_back_as_it_was(
    name: str, kind: int, created: int, consumers: list[ConsumerRow]
) -> None:
    row = SubscriptionRow(name, kind, created, tuple(consumers))
    assert decode_subscription(encode_subscription(row), "it") == row


def test_the_example_of_the_document_is_encoded_so() -> None:
    consumer = ConsumerRow(9_223_372_036_854_775_809, "billing-1", ("eu-*",), 1_790_000_000_000)
    row = SubscriptionRow("billing", 3, 1_780_000_000_000, (consumer,))
    data = (
        '{"consumers":[{"filters":["eu-*"],"id":9223372036854775809,"name":"billing-1",'
        '"seen_ms":1790000000000}],"created_ms":1780000000000,"kind":3,"name":"billing"}'
    )
    assert encode_subscription(row).decode() == data
    assert f"`{data}`" in (ROOT / "docs/formats/catalog.md").read_text()


def test_a_row_with_too_many_consumers_keeps_those_that_were_seen_last() -> None:
    count = SUBSCRIPTION_CONSUMERS_MAX + 5
    # the first five were seen longest ago, but they are not the first ones in the row
    consumers = [ConsumerRow(number, "c", (), number) for number in range(count)]
    row = SubscriptionRow("s", 1, 0, (*consumers[5:], *consumers[:5]))
    kept = decode_subscription(encode_subscription(row), "it").consumers
    assert kept == tuple(consumers[5:])


def test_a_row_that_is_too_large_keeps_the_consumers_that_were_seen_last() -> None:
    filters = tuple(f"{at:03}" + "\1" * (CONSUMER_FILTER_BYTES_MAX - 3) for at in range(64))
    consumers = tuple(
        ConsumerRow(at, "\1" * CONSUMER_NAME_BYTES_MAX, filters, 100 - at) for at in range(4)
    )
    row = SubscriptionRow("\1" * SUBSCRIPTION_NAME_BYTES_MAX, 3, 0, consumers)
    data = encode_subscription(row)
    assert len(data) <= SUBSCRIPTION_BYTES_MAX
    assert decode_subscription(data, "it").consumers == consumers[:2]
    alone = replace(row, consumers=consumers[3:])
    assert decode_subscription(encode_subscription(alone), "it") == alone, "one always fits"


def test_fields_of_a_later_release_are_kept() -> None:
    data = b'{"consumers":[{"id":1,"later":2,"name":"c"}],"kind":0,"name":"s","new":{"a":[1]}}'
    row = decode_subscription(data, "it")
    assert (row.created_ms, row.consumers[0].filters) == (0, ())
    body = json.loads(encode_subscription(replace(row, kind=1)))
    assert body["new"] == {"a": [1]}
    assert body["consumers"][0]["later"] == 2


def test_a_kind_of_a_later_release_can_be_read() -> None:
    row = decode_subscription(b'{"kind":9,"name":"s"}', "it")
    assert row.kind_name == "kind 9"
    assert SubscriptionRow("s", 3).kind_name == "key-shared"
    with pytest.raises(UsageError, match="kind is 9; it must be 0 to 3"):
        encode_subscription(row)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"name": ""}, "name"),
    ({"name": "x" * (SUBSCRIPTION_NAME_BYTES_MAX + 1)}, "1 to 256 bytes"),
    ({"name": "\ud800"}, "Unicode text"),
    ({"kind": 4}, "kind is 4"),
    ({"kind": True}, "kind is True"),
    ({"created_ms": -1}, "created_ms"),
    ({"consumers": (ConsumerRow(2**64, "c"),)}, "the id of a consumer"),
    ({"consumers": (ConsumerRow(1, "x" * 257),)}, "the name of a consumer"),
    ({"consumers": (ConsumerRow(1, "c", ("f",) * (CONSUMER_FILTERS_MAX + 1)),)}, "65 filters"),
    ({"consumers": (ConsumerRow(1, "c", ("x" * 257,)),)}, "the filter of a consumer"),
    ({"consumers": (ConsumerRow(1, "c"), ConsumerRow(1, "d"))}, "the same id"),
]


@pytest.mark.parametrize(("fields", "said"), BAD)
def test_what_is_over_a_limit_is_refused_with_what_is_wrong(
    fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        encode_subscription(replace(SubscriptionRow("s", 1), **fields))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"\xff",
        b'{"kind":1}',
        b'{"kind":-1,"name":"s"}',
        b'{"kind":"1","name":"s"}',
        b'{"consumers":{},"kind":1,"name":"s"}',
        b'{"consumers":[1],"kind":1,"name":"s"}',
        b'{"consumers":[{"id":1}],"kind":1,"name":"s"}',
        b'{"consumers":[{"id":1,"name":"c","filters":[1]}],"kind":1,"name":"s"}',
        b"[" * 100_000,
        b" " * (2 * SUBSCRIPTION_BYTES_MAX + 1),
    ],
)
def test_a_damaged_row_is_named(data: bytes) -> None:
    with pytest.raises(DescriptorError, match="the row"):
        decode_subscription(data, "the row")
