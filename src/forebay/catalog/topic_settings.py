"""The rows of the catalog with a topic's own settings, and with the policies of a namespace.

    <topic>/settings
    namespaces/<namespace>/offload

A row is a JSON object of keys and values. This module does not interpret them: see
`forebay.config.topics` and `forebay.config.offload_policies`. A change reads the row, and writes it
if nobody else has changed it since. Keys that this release does not know are therefore kept.

Beware: the rows are only in the catalog. A topic that was rebuilt from its bucket alone has none. A
namespace has policies whether or not it has topics, and keeps them when its last topic is deleted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

from forebay.catalog.catalog import Catalog
from forebay.catalog.kv import ABSENT, Compare, Entry, Put, Remove
from forebay.catalog.records import TopicRecord, decode_json, decode_record
from forebay.errors import DescriptorError, ServiceUnavailable, UnknownTopic, UsageError
from forebay.format.names import TopicName
from forebay.limits import OFFLOAD_POLICIES_BYTES_MAX, TOPIC_SETTINGS_BYTES_MAX

Values: TypeAlias = Mapping[str, Any]
_TRIES: Final = 100


def read_topic_settings(catalog: Catalog, topic: TopicName) -> dict[str, Any]:
    """Returns the topic's own settings, which may be none; DescriptorError if they are damaged."""
    return _decoded(catalog.kv.get(catalog.keys.settings(topic)))


def read_namespace_policies(catalog: Catalog, namespace: str) -> dict[str, Any]:
    """Returns a namespace's offload policies, which may be none; DescriptorError if damaged."""
    return _decoded(catalog.kv.get(catalog.keys.offload_policies(namespace)))


def change_topic_settings(
    catalog: Catalog, topic: TopicName, change: Callable[[dict[str, Any]], Values]
) -> dict[str, Any]:
    """Replaces the topic's own settings by what `change` makes of them, and returns that.

    `change` is called again when another process changed them first. Raises UnknownTopic if the
    catalog does not have the topic, UsageError if there is too much to store, and
    ServiceUnavailable if every attempt lost against another process.
    """

    def there() -> list[Compare]:
        # Compared too: the settings of a topic that is being deleted must not come back.
        known = catalog.kv.get(catalog.keys.record(topic))
        if known is None or decode_record(known.value, TopicRecord, known.key).is_deleted:
            raise UnknownTopic(f"there is no topic {topic} in {catalog.name}")
        return [Compare(known.key, known.revision)]

    row = _Row(catalog.keys.settings(topic), f"the settings of {topic}", TOPIC_SETTINGS_BYTES_MAX)
    return _change(catalog, row, change, there)


def change_namespace_policies(
    catalog: Catalog, namespace: str, change: Callable[[dict[str, Any]], Values]
) -> dict[str, Any]:
    """Replaces the offload policies of a namespace by what `change` makes of them.

    Raises the same errors as `change_topic_settings`, but UnknownTopic.
    """
    key, what = catalog.keys.offload_policies(namespace), f"the offload policies of {namespace}"
    return _change(catalog, _Row(key, what, OFFLOAD_POLICIES_BYTES_MAX), change, list)


class _Row(NamedTuple):
    key: str
    what: str
    """The row in errors."""
    bytes_max: int


def _change(
    catalog: Catalog,
    row: _Row,
    change: Callable[[dict[str, Any]], Values],
    conditions: Callable[[], list[Compare]],
) -> dict[str, Any]:
    for _ in range(_TRIES):
        compares = conditions()
        entry = catalog.kv.get(row.key)
        before = _decoded(entry)
        after = dict(change(dict(before)))
        if after == before:
            return after
        value = json.dumps(after, separators=(",", ":"), sort_keys=True).encode()
        if len(value) > row.bytes_max:
            raise UsageError(
                f"{row.what} have {len(value)} bytes; at most {row.bytes_max} are allowed"
            )
        compares.append(Compare(row.key, entry.revision if entry else ABSENT))
        write = Put(row.key, value) if after else Remove(row.key)
        if catalog.kv.commit(compares, [write]) is not None:
            return after
    raise ServiceUnavailable(
        f"other processes kept changing {row.what} in {catalog.name}; try again"
    )


def _decoded(entry: Entry | None) -> dict[str, Any]:
    if entry is None:
        return {}
    found = decode_json(entry.value, entry.key)
    if not isinstance(found, dict):
        raise DescriptorError(f"{entry.key} is not a JSON object")
    return found
