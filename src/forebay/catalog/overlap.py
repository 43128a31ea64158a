"""The descriptors that hold a range of offsets, as of one moment.

The one that begins before the range is found by a request of its own. A compaction between the
two requests moves the border between objects: without a second look the answer could have a hole
that never was, which to a reader is the end of the topic, or lost data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from forebay.catalog.kv import Entry, Kv
from forebay.errors import DescriptorError, ServiceUnavailable
from forebay.format.descriptor import ObjectDescriptor, decode_descriptor
from forebay.format.names import CatalogKeys, TopicName
from forebay.limits import OFFSET_MAX

_TRIES: Final = 100
"""Each lost to a compaction that was committed in between."""


def overlapping(
    kv: Kv,
    keys: CatalogKeys,
    topic: TopicName,
    offsets: tuple[int, int | None],
    limit: int,
    decoder: Callable[[bytes], ObjectDescriptor] = decode_descriptor,
) -> list[ObjectDescriptor]:
    """Those that overlap `offsets`, oldest first, at most `limit`."""
    start, end = offsets
    if end is not None and end <= start:
        return []
    first = keys.descriptor(topic, 0)
    from_start = keys.descriptor(topic, start)
    stop = keys.descriptor(topic, OFFSET_MAX if end is None else end)

    prefix = keys.objects(topic)

    def decode(entries: Sequence[Entry]) -> list[ObjectDescriptor]:
        return [decoded(kv, prefix, entry, decoder) for entry in entries]

    for _ in range(_TRIES):
        before = kv.range(first, from_start, limit=1, descending=True)
        found = [each for each in decode(before) if each.end_offset >= start]
        if len(found) >= limit:
            return found
        found += decode(kv.range(from_start, stop, limit=limit - len(found)))
        if _follow(found, start):
            return found
        if kv.range(first, from_start, limit=1, descending=True) == before:
            return found
    raise ServiceUnavailable(f"{topic}: {kv.name} changes too fast to be read")


def decoded(
    kv: Kv,
    prefix: str,
    entry: Entry,
    decoder: Callable[[bytes], ObjectDescriptor] = decode_descriptor,
) -> ObjectDescriptor:
    """The descriptor that the entry holds; DescriptorError if it is none of its key.

    `prefix` is what the keys of the topic's descriptors start with.
    """
    try:
        found = decoder(entry.value)
    except DescriptorError as error:
        raise DescriptorError(f"{kv.name}: {entry.key}: {error}") from error
    if entry.key != f"{prefix}{found.start_offset:020d}":
        raise DescriptorError(f"{kv.name}: {entry.key} holds offset {found.start_offset}")
    return found


def _follow(found: Sequence[ObjectDescriptor], start: int) -> bool:
    """Whether the first one holds `start`, and the border between the requests has no gap."""
    if not found or found[0].start_offset > start:
        return False
    if found[0].start_offset == start:
        return True
    return len(found) > 1 and found[1].start_offset == found[0].next_offset
