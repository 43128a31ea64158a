"""What a reader does at a hole: offsets of a topic that have no message (rule R9b).

Every reader has the same two cases. It jumps over an accepted range, in one step however wide, and
reports that once (`report_jump`). At a lost or unknown range it raises LostOffsets for all of it
(`lost_error`), until an operator accepts it with `forebay accept-loss`.

Beware: the record decides, and it can change at any time. Read it again before raising.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from forebay.catalog.records import Range, TopicRecord
from forebay.errors import LostOffsets
from forebay.format.names import TopicName
from forebay.logs import event
from forebay.read.metrics import JUMPS

_log: Final = logging.getLogger("forebay.read")
_NAMED_MAX: Final = 3
"""The most ranges of one kind to name in a message."""


def lost_error(
    topic: TopicName | str, record: TopicRecord, hole: Range, skip: str | None = None
) -> LostOffsets:
    """Returns the error for a reader that has reached the lost and unknown offsets `hole`.

    `skip` says how this reader can skip the range, in the imperative.
    """
    words, skip = hole_words(record, hole), skip or f"continue at offset {hole[1]}"
    return LostOffsets(
        f"{topic}: offsets {hole[0]} to {hole[1] - 1} {words}. "
        f"Accept this with `forebay accept-loss {topic}`, or {skip}",
        start=hole[0],
        end=hole[1],
    )


def hole_words(record: TopicRecord, hole: Range) -> str:
    """Says which offsets of `hole` are lost and which may never have been used: "are lost"."""
    said = []
    for ranges, what in (
        (record.lost, "lost"),
        (record.unknown, "unknown: they may never have been used, and are lost if they were"),
    ):
        found = [each for each in ranges if each[0] < hole[1] and hole[0] < each[1]]
        if found == [hole]:
            return f"are {what}"
        if found:
            said.append(f"{_named(found)} are {what}")
    return f"have no messages: {'; '.join(said)}"


def _named(ranges: Sequence[Range]) -> str:
    more = f" and {len(ranges) - _NAMED_MAX} more ranges" if len(ranges) > _NAMED_MAX else ""
    return ", ".join(f"{first} to {end - 1}" for first, end in ranges[:_NAMED_MAX]) + more


def report_jump(topic: TopicName | str, start: int, end: int) -> None:
    """Logs and counts that a reader jumped over the accepted offsets `start..end`."""
    JUMPS.add()
    event(
        _log,
        logging.INFO,
        "a reader jumped over offsets without messages, which were accepted",
        topic=topic,
        first=start,
        last=end - 1,
    )
