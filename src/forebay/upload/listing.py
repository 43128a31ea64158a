"""What the object store's listing says of topics: which there are, and what lies in each.

A listing is streamed, in the order of names. An object and its sidecar are neighbours in it, so
both come together, whichever of them is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from forebay.format.names import (
    SIDECAR_ENDING,
    TOPICS_PREFIX,
    TopicName,
    after_prefix,
    objects_prefix,
    parse_object,
    parse_pending,
    topic_of_key,
)
from forebay.limits import OFFSET_MAX
from forebay.objects.backend import Backend, ObjectMeta


@dataclass(frozen=True, slots=True)
class Stored:
    """One object as it is listed: itself, its sidecar, or both."""

    object_id: str
    object: ObjectMeta | None
    sidecar: ObjectMeta | None


def is_object_name(name: str) -> bool:
    """Whether it is the name of a finished or of a pending object."""
    finished = parse_object(name)
    if finished is not None:
        return finished.end < OFFSET_MAX
    start = parse_pending(name)
    return start is not None and start < OFFSET_MAX


def walk(store: Backend, topic: TopicName) -> Iterator[Stored | ObjectMeta]:
    """Everything below the topic's prefix, by name; a plain ObjectMeta is nobody's file."""
    prefix = objects_prefix(topic)
    waiting: ObjectMeta | None = None
    for meta in store.list(prefix):
        name = meta.key.removeprefix(prefix)
        owner = name.removesuffix(SIDECAR_ENDING)
        if not is_object_name(owner):
            yield meta
        elif owner == name:
            if waiting is not None:
                yield Stored(waiting.key.removeprefix(prefix), waiting, None)
            waiting = meta
        elif waiting is not None and waiting.key == prefix + owner:
            yield Stored(owner, waiting, meta)
            waiting = None
        else:
            if waiting is not None:
                yield Stored(waiting.key.removeprefix(prefix), waiting, None)
                waiting = None
            yield Stored(owner, None, meta)
    if waiting is not None:
        yield Stored(waiting.key.removeprefix(prefix), waiting, None)


def topics_in_store(store: Backend) -> Iterator[TopicName]:
    """Every topic that has a key below its objects' prefix; one request or so for each."""
    after: str | None = None
    while (meta := next(store.list(TOPICS_PREFIX, after=after), None)) is not None:
        parts = meta.key.removeprefix(TOPICS_PREFIX).split("/")
        if len(parts) < 3:
            after = meta.key
            continue
        own = TOPICS_PREFIX + "/".join(parts[:2]) + "/"
        found = topic_of_key(f"{own}objects/any")
        if found is not None and next(store.list(objects_prefix(found[0])), None) is not None:
            yield found[0]
        after = after_prefix(own)
