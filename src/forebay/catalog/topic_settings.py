"""The row of the catalog with a topic's own settings.

    <topic>/settings

The row is a JSON object of keys and values. This module does not interpret them: see
`forebay.config.topics`. A change reads the row, and writes it if nobody else has changed it since.
Keys that this release does not know are therefore kept.

Beware: the row is only in the catalog. A topic that was rebuilt from its bucket alone has none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from forebay.catalog.catalog import Catalog
from forebay.catalog.kv import ABSENT, Compare, Entry, Put, Remove
from forebay.catalog.records import TopicRecord, decode_json, decode_record
from forebay.errors import DescriptorError, ServiceUnavailable, UnknownTopic, UsageError
from forebay.format.names import TopicName
from forebay.limits import TOPIC_SETTINGS_BYTES_MAX

_TRIES: Final = 100


def read_topic_settings(catalog: Catalog, topic: TopicName) -> dict[str, Any]:
    """Returns the topic's own settings, which may be none; DescriptorError if they are damaged."""
    return _decoded(catalog.kv.get(catalog.keys.settings(topic)))


def change_topic_settings(
    catalog: Catalog,
    topic: TopicName,
    change: Callable[[dict[str, Any]], Mapping[str, Any]],
) -> dict[str, Any]:
    """Replaces the topic's own settings by what `change` makes of them, and returns that.

    `change` is called again when another process changed them first. Raises UnknownTopic if the
    catalog does not have the topic, UsageError if there is too much to store, and
    ServiceUnavailable if every attempt lost against another process.
    """
    key = catalog.keys.settings(topic)
    for _ in range(_TRIES):
        # Compared too: the settings of a topic that is being deleted must not come back.
        known = catalog.kv.get(catalog.keys.record(topic))
        if known is None or decode_record(known.value, TopicRecord, known.key).is_deleted:
            raise UnknownTopic(f"there is no topic {topic} in {catalog.name}")
        entry = catalog.kv.get(key)
        before = _decoded(entry)
        after = dict(change(dict(before)))
        if after == before:
            return after
        value = json.dumps(after, separators=(",", ":"), sort_keys=True).encode()
        if len(value) > TOPIC_SETTINGS_BYTES_MAX:
            raise UsageError(
                f"the settings of {topic} have {len(value)} bytes; at most "
                f"{TOPIC_SETTINGS_BYTES_MAX} are allowed"
            )
        compares = [
            Compare(known.key, known.revision),
            Compare(key, entry.revision if entry else ABSENT),
        ]
        write = Put(key, value) if after else Remove(key)
        if catalog.kv.commit(compares, [write]) is not None:
            return after
    raise ServiceUnavailable(
        f"{topic}: other processes kept changing its settings in {catalog.name}; try again"
    )


def _decoded(entry: Entry | None) -> dict[str, Any]:
    if entry is None:
        return {}
    found = decode_json(entry.value, entry.key)
    if not isinstance(found, dict):
        raise DescriptorError(f"{entry.key} is not a JSON object")
    return found
