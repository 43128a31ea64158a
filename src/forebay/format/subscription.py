"""`SubscriptionRow`: a subscription of a topic, without its cursor, as JSON for the catalog.

    {"consumers":[{"filters":["eu-*"],"id":17,"name":"billing-1","seen_ms":1790000000000}],
     "created_ms":1790000000000,"kind":3,"name":"billing"}

`kind` is Danube's number. `consumers` are those that were connected, so that each gets the same id
when it comes back. The layout: `docs/formats/catalog.md`. The cursor has a row of its own, because
it changes far more often: `forebay.format.cursor`.

A row takes at most SUBSCRIPTION_BYTES_MAX, and has at most SUBSCRIPTION_CONSUMERS_MAX consumers.
Beyond that, those that were seen longest ago are left out.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any, Final

from forebay.errors import DescriptorError, UsageError
from forebay.limits import (
    CONSUMER_FILTER_BYTES_MAX,
    CONSUMER_FILTERS_MAX,
    CONSUMER_NAME_BYTES_MAX,
    OFFSET_MAX,
    SUBSCRIPTION_BYTES_MAX,
    SUBSCRIPTION_CONSUMERS_MAX,
    SUBSCRIPTION_NAME_BYTES_MAX,
)

KINDS: Final = ("exclusive", "shared", "failover", "key-shared")
"""The kinds of subscriptions; each one's place is its number."""

_ID_MAX: Final = 2**64 - 1
_KNOWN: Final = frozenset({"consumers", "created_ms", "kind", "name"})
_CONSUMER_KNOWN: Final = frozenset({"filters", "id", "name", "seen_ms"})


@dataclass(frozen=True, slots=True)
class ConsumerRow:
    id: int
    name: str
    filters: tuple[str, ...] = ()
    """Patterns of the routing keys that it wants; empty: all of them."""
    seen_ms: int = 0
    """When it was connected last, in milliseconds since 1970."""
    extra: str = ""
    """Fields that this release does not know, as JSON."""


@dataclass(frozen=True, slots=True)
class SubscriptionRow:
    name: str
    kind: int
    created_ms: int = 0
    consumers: tuple[ConsumerRow, ...] = ()
    extra: str = ""
    """Fields that this release does not know, as JSON."""

    @property
    def kind_name(self) -> str:
        """The name of its kind; for one of a later release, its number."""
        return KINDS[self.kind] if self.kind < len(KINDS) else f"kind {self.kind}"


def check_subscription(row: SubscriptionRow) -> None:
    """Raises UsageError if the row cannot be stored, and says which part of it is wrong."""
    what = f"the subscription {str(row.name)[:80]!r}"
    _check_text(what, "name", row.name, SUBSCRIPTION_NAME_BYTES_MAX, least=1)
    if type(row.kind) is not int or not 0 <= row.kind < len(KINDS):
        raise UsageError(f"{what}: kind is {row.kind!r}; it must be 0 to {len(KINDS) - 1}")
    _check_number(what, "created_ms", row.created_ms)
    for each in row.consumers:
        _check_consumer(what, each)
    ids = [each.id for each in row.consumers]
    if len(set(ids)) < len(ids):
        raise UsageError(f"{what}: two consumers have the same id")


def _check_consumer(what: str, consumer: ConsumerRow) -> None:
    _check_number(what, "id of a consumer", consumer.id, _ID_MAX)
    _check_text(what, "name of a consumer", consumer.name, CONSUMER_NAME_BYTES_MAX)
    _check_number(what, "seen_ms of a consumer", consumer.seen_ms)
    if len(consumer.filters) > CONSUMER_FILTERS_MAX:
        raise UsageError(
            f"{what}: a consumer has {len(consumer.filters)} filters; at most "
            f"{CONSUMER_FILTERS_MAX} are allowed"
        )
    for each in consumer.filters:
        _check_text(what, "filter of a consumer", each, CONSUMER_FILTER_BYTES_MAX, least=1)


def _check_text(what: str, field: str, value: object, bytes_max: int, least: int = 0) -> None:
    try:
        size = len(value.encode()) if isinstance(value, str) else -1
    except UnicodeEncodeError:
        size = -1
    if not least <= size <= bytes_max:
        raise UsageError(
            f"{what}: the {field} is {str(value)[:80]!r}; it must be Unicode text of {least} to "
            f"{bytes_max} bytes"
        )


def _check_number(what: str, field: str, value: int, most: int = OFFSET_MAX) -> None:
    if type(value) is not int or not 0 <= value <= most:
        raise UsageError(f"{what}: the {field} is {value!r}; it must be an integer in 0..{most}")


def encode_subscription(row: SubscriptionRow) -> bytes:
    """Encodes the row, with its most recently seen consumers if it would be over the limits.

    Raises UsageError if another part of it is over a limit, or wrong.
    """
    check_subscription(row)
    kept = row
    if len(row.consumers) > SUBSCRIPTION_CONSUMERS_MAX:
        kept = _with_newest(row, SUBSCRIPTION_CONSUMERS_MAX)
    data = _encoded(kept)
    if len(data) <= SUBSCRIPTION_BYTES_MAX:
        return data
    low, high = 0, len(kept.consumers) - 1
    while low < high:  # the number of consumers that fit
        middle = (low + high + 1) // 2
        fits = len(_encoded(_with_newest(row, middle))) <= SUBSCRIPTION_BYTES_MAX
        low, high = (middle, high) if fits else (low, middle - 1)
    data = _encoded(_with_newest(row, low))
    if len(data) > SUBSCRIPTION_BYTES_MAX:
        raise UsageError(
            f"the subscription {row.name[:80]!r} has {len(data)} bytes without its consumers; at "
            f"most {SUBSCRIPTION_BYTES_MAX} are allowed"
        )
    return data


def _with_newest(row: SubscriptionRow, count: int) -> SubscriptionRow:
    """The row with the `count` consumers that were seen last, in the order that they have."""
    newest = sorted(row.consumers, key=lambda each: (-each.seen_ms, each.id))[:count]
    ids = {each.id for each in newest}
    return replace(row, consumers=tuple(each for each in row.consumers if each.id in ids))


def _encoded(row: SubscriptionRow) -> bytes:
    body = json.loads(row.extra) if row.extra else {}
    body |= {
        "consumers": [_consumer_body(each) for each in row.consumers],
        "created_ms": row.created_ms,
        "kind": row.kind,
        "name": row.name,
    }
    return _json(body).encode()


def _consumer_body(consumer: ConsumerRow) -> dict[str, Any]:
    body = json.loads(consumer.extra) if consumer.extra else {}
    return {
        **body,
        "filters": list(consumer.filters),
        "id": consumer.id,
        "name": consumer.name,
        "seen_ms": consumer.seen_ms,
    }


def decode_subscription(data: bytes, what: str) -> SubscriptionRow:
    """Decodes a row. `what` names it in the DescriptorError. Keeps fields it does not know."""
    if len(data) > 2 * SUBSCRIPTION_BYTES_MAX:
        raise DescriptorError(f"{what} has {len(data)} bytes, which is too large")
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DescriptorError(f"{what}: {error}") from error
    if not isinstance(body, dict):
        raise DescriptorError(f"{what} is not a JSON object")
    consumers = body.get("consumers", [])
    if not isinstance(consumers, list):
        raise DescriptorError(f"{what}: consumers is not a list")
    return SubscriptionRow(
        _text(body, "name", what),
        _number(body, "kind", what),
        _number(body, "created_ms", what, 0),
        tuple(_decoded_consumer(each, what) for each in consumers),
        _unknown(body, _KNOWN),
    )


def _decoded_consumer(body: Any, what: str) -> ConsumerRow:
    if not isinstance(body, dict):
        raise DescriptorError(f"{what}: a consumer is not a JSON object")
    filters = body.get("filters", [])
    if not isinstance(filters, list) or not all(isinstance(each, str) for each in filters):
        raise DescriptorError(f"{what}: the filters of a consumer are not a list of texts")
    return ConsumerRow(
        _number(body, "id", what, most=_ID_MAX),
        _text(body, "name", what),
        tuple(filters),
        _number(body, "seen_ms", what, 0),
        _unknown(body, _CONSUMER_KNOWN),
    )


def _text(body: dict[str, Any], name: str, what: str) -> str:
    value = body.get(name)
    if not isinstance(value, str):
        raise DescriptorError(f"{what}: {name} is not a text")
    return value


def _number(
    body: dict[str, Any], name: str, what: str, default: int | None = None, most: int = OFFSET_MAX
) -> int:
    value = body.get(name, default)
    if type(value) is not int or not 0 <= value <= most:
        raise DescriptorError(f"{what}: {name} is not an integer in 0..{most}")
    return value


def _unknown(body: dict[str, Any], known: frozenset[str]) -> str:
    unknown = {name: value for name, value in body.items() if name not in known}
    return _json(unknown) if unknown else ""


def _json(body: dict[str, Any]) -> str:
    return json.dumps(body, separators=(",", ":"), sort_keys=True)
