"""A topic's object as a ledger: what its index object and its descriptor say besides Pulsar's own.

The entry `n` of a ledger is the message with the offset `start + n`. The custom metadata of the
index object name the topic as Pulsar does, and in addition what the name of the object would say,
if it were Forebay's: the topic, the offset of the first entry, and the hash of the frames. With
them a restore needs nothing but the bucket.

Beware: a ledger that a broker wrote has none of the additions. It is not an object of a topic.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from forebay.errors import LedgerError
from forebay.format.descriptor import Ledger
from forebay.format.names import LedgerName, TopicName, managed_ledger_name
from forebay.format.pulsar.blocks import IndexedBlock
from forebay.format.pulsar.index import LedgerIndex
from forebay.format.pulsar.ledger_metadata import (
    APPLICATION,
    COMPONENT,
    MANAGED_LEDGER,
    LedgerMetadata,
)
from forebay.limits import OFFSET_MAX

START_OFFSET: Final = "forebay/start-offset"
TOPIC: Final = "forebay/topic"
CONTENT_HASH: Final = "forebay/content-hash"
RAW_BYTES: Final = "forebay/raw-bytes"
PUBLISHED: Final = "forebay/highest-publish-time"
_DIGITS: Final = re.compile(r"0|[1-9][0-9]{0,18}")


@dataclass(frozen=True, slots=True)
class LedgerContent:
    """What a topic's ledger holds."""

    topic: TopicName
    start_offset: int
    messages: int
    entry_bytes: int
    """Bytes of all entries, without their headers."""
    data_bytes: int
    """Bytes of the data object."""
    raw_bytes: int
    """Bytes of the same messages as frames."""
    content_hash: str
    highest_publish_time: int | None


def topic_ledger_index(content: LedgerContent, blocks: Sequence[IndexedBlock]) -> LedgerIndex:
    """Returns the index object of a topic's ledger. The same content gives the same one."""
    published = content.highest_publish_time
    texts = [
        (APPLICATION, "pulsar"),
        (COMPONENT, "managed-ledger"),
        (MANAGED_LEDGER, managed_ledger_name(content.topic)),
        (TOPIC, str(content.topic)),
        (START_OFFSET, str(content.start_offset)),
        (RAW_BYTES, str(content.raw_bytes)),
        (CONTENT_HASH, content.content_hash),
    ]
    if published is not None:
        texts.append((PUBLISHED, str(published)))
    metadata = LedgerMetadata(
        content.entry_bytes,
        content.messages - 1,
        created_ms=published or 0,
        custom=tuple((name, text.encode()) for name, text in texts),
    )
    return LedgerIndex(content.data_bytes, metadata, tuple(blocks))


def offsets_of_ledger(index: LedgerIndex) -> tuple[int, int] | None:
    """Returns the offsets of a topic's ledger, the end not included; None if it is not one."""
    try:
        text = index.metadata.text(START_OFFSET)
    except LedgerError:
        return None
    if text is None or not _DIGITS.fullmatch(text) or index.last_entry_id < 0:
        return None
    end = int(text) + index.last_entry_id + 1
    return (int(text), end) if end <= OFFSET_MAX else None


def content_hash_of(index: LedgerIndex) -> str | None:
    """Returns the hash of the frames of a topic's ledger; None if the index says none."""
    try:
        return index.metadata.text(CONTENT_HASH)
    except LedgerError:
        return None


def block_bytes_of(index: LedgerIndex) -> int:
    """Returns the size of the blocks: that of all but the last one."""
    return index.blocks[1].position if len(index.blocks) > 1 else index.data_bytes


def ledger_facts(name: LedgerName, block_bytes: int, index_bytes: int) -> Ledger:
    """Returns what the descriptor of a ledger says about it."""
    facts: dict[str, int | str] = {
        "block_bytes": block_bytes,
        "id": name.ledger_id,
        "index_bytes": index_bytes,
        "uid": name.uid,
    }
    return tuple(sorted(facts.items()))
