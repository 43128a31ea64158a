"""A topic's chain as the catalog tells it, looked at until it stands still."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Final

from forebay.catalog.catalog import Catalog
from forebay.catalog.job_state import JobState, find_job_state
from forebay.catalog.records import TopicRecord
from forebay.errors import DescriptorError
from forebay.format.descriptor import ObjectDescriptor, decode_descriptor
from forebay.format.names import TopicName
from forebay.limits import CATALOG_PAGE, OFFSET_MAX
from forebay.logs import event
from forebay.pipeline.jobs.verify_plan import (
    NOTE,
    Flaw,
    Link,
    Memory,
    Survey,
    chain_flaws,
    decode_memory,
)

_log: Final = logging.getLogger("forebay.pipeline")
_LOOKS_MAX: Final = 3
"""At a chain that is not whole, before it is called so: it may be changing."""


def survey_topic(catalog: Catalog, topic: TopicName) -> tuple[Survey, JobState | None] | None:
    """The chain, its flaws, and what was remembered of it; None if the catalog has no record."""
    record = catalog.record(topic)
    if record is None:
        return None
    survey = _look(catalog, topic, record)
    flaws = set(survey.flaws)
    for _ in range(_LOOKS_MAX - 1):
        if not flaws:
            break
        survey = _look(catalog, topic, catalog.record(topic) or record)
        flaws &= set(survey.flaws)
    note = find_job_state(catalog, topic, NOTE)
    memory = Memory() if note is None else _memory(topic, note)
    return replace(survey, flaws=tuple(sorted(flaws)), memory=memory), note


def still_named(catalog: Catalog, topic: TopicName, link: Link) -> ObjectDescriptor | None:
    """The descriptor of the object, if the catalog names it still."""
    entry = catalog.kv.get(catalog.keys.descriptor(topic, link.start))
    if entry is None:
        return None
    try:
        found = decode_descriptor(entry.value)
    except DescriptorError:  # a flaw, which the next survey tells
        return None
    return found if found.object_id == link.object_id else None


def named_instead(catalog: Catalog, topic: TopicName, gone: Collection[Link]) -> list[Link]:
    """What the catalog names by now for the offsets of objects that it named before."""
    before = sorted(gone)
    found = []
    for link in _links(catalog, topic, []):
        at = bisect_left(before, (link.next_offset,))  # those that begin before its end
        if at and before[at - 1].next_offset > link.start:
            found.append(link)
    return found


def link_of(descriptor: ObjectDescriptor, revision: int = 0) -> Link:
    return Link(
        descriptor.start_offset,
        descriptor.next_offset,
        descriptor.size,
        descriptor.object_id,
        revision,
    )


def _look(catalog: Catalog, topic: TopicName, record: TopicRecord) -> Survey:
    # Before the descriptors: what is written meanwhile counts as new the next time.
    revision = catalog.kv.revision()
    flaws: list[Flaw] = []
    links = tuple(_links(catalog, topic, flaws))
    flaws += chain_flaws(record, links)
    return Survey(topic, record, links, revision, tuple(flaws))


def _links(catalog: Catalog, topic: TopicName, flaws: list[Flaw]) -> Iterator[Link]:
    """Every descriptor, a page at a time; overlaps too, which readers never see."""
    keys = catalog.keys
    at, end = keys.descriptor(topic, 0), keys.descriptor(topic, OFFSET_MAX)
    while page := catalog.kv.range(at, end, limit=CATALOG_PAGE):
        for entry in page:
            start = keys.descriptor_start(topic, entry.key)
            try:
                descriptor = decode_descriptor(entry.value)
            except DescriptorError as error:
                flaws.append(Flaw("descriptor", start or 0, 0, f"{entry.key}: {error}"))
                continue
            if descriptor.start_offset == start:
                yield link_of(descriptor, entry.revision)
            else:
                detail = f"{entry.key} holds offset {descriptor.start_offset}"
                flaws.append(Flaw("descriptor", start or 0, 0, detail))
        at = page[-1].key + "\1"


def _memory(topic: TopicName, note: JobState) -> Memory:
    try:
        return decode_memory(note.value, f"{topic}: the note {NOTE!r}")
    except DescriptorError as error:
        event(_log, logging.WARNING, "memory forgotten", topic=topic, error=error)
        return Memory()
