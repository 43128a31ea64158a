"""What a sink has appended to a topic: the mark of each message, the note, and what follows.

Every message that a sink appends carries the attribute `forebay.sink`:

<sink id>/<batch>/<partition>/<row>

The owner appends in the order of (batch, partition, row), so the last message of a sink tells
what is there. To find it without reading the whole topic, the catalog keeps a note for each
sink: before a batch it says where the topic ended, after it that the batch is complete.

The log is the truth and the note a memory of it: a note that may be older than the log (after
a restore) only says from where on to look. `decide` is pure.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Final, NamedTuple

from forebay.catalog.job_state import ORIGIN_HERE
from forebay.errors import DescriptorError, UsageError
from forebay.format.names import TopicName
from forebay.limits import OFFSET_MAX
from forebay.pipeline.sink.staging import (
    Part,
)

MARK: Final = "forebay.sink"
_SINK_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_NUMBER: Final = re.compile(r"0|[1-9][0-9]{0,18}")


class Position(NamedTuple):
    """Which row a message is; positions of a sink in a topic only grow."""

    batch: int
    partition: int
    row: int
    """The number of the row in its partition, whatever topic the others go to."""


@dataclass(frozen=True, slots=True)
class Run:
    """One batch of one sink."""

    sink_id: str
    batch: int
    named: bool
    """False: the id is random, so nothing of it can be there, and nobody will ask again."""
    streaming: bool = False


@dataclass(frozen=True, slots=True)
class SinkNote:
    """What the catalog remembers of a sink in a topic."""

    batch: int
    done: bool
    offset: int
    """Messages of the batch are at or after it; once it is done, those of the next one are."""
    rows: int
    """Of the batch, in this topic."""
    shape: str
    """Tells whether the same rows are in the same partitions, by their numbers."""
    write: str
    """Whose staged files the batch is appended from."""
    origin: str | None
    """Of the topic's notes when this one was written."""
    previous: int | None = None
    """The batch that was complete before this one."""
    digest: int | None = None
    """The sum of the checksums of the batch's values, in all topics."""


class Action(Enum):
    APPEND = "append"
    """Nothing of the batch is there, unless a look into the log finds it."""
    RESUME = "resume"
    """A run of the batch began to append and did not end."""
    KNOWN = "known"
    """All of the batch is there."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do with a batch in one topic."""

    action: Action
    look_from: int | None = None
    """Where to look in the log for messages of the sink; None: there is no need to."""


def check_sink_id(sink_id: str) -> str:
    if _SINK_ID.fullmatch(sink_id) is None:
        raise UsageError(
            f"the sinkId {sink_id!r} must be 1 to 128 letters, digits, '.', '_', ':' and '-', and "
            "begin with a letter or digit"
        )
    return sink_id


def mark_prefix(sink_id: str, batch: int, partition: int) -> str:
    """What the marks of one partition's rows start with; the number of the row follows."""
    return f"{sink_id}/{batch}/{partition}/"


def parse_mark(text: str | None, sink_id: str) -> Position | None:
    """The position that the attribute gives, if it is this sink's."""
    if text is None or not text.startswith(sink_id):
        return None
    parts = text.removeprefix(sink_id).split("/")
    if len(parts) != 4 or parts[0] or not all(_NUMBER.fullmatch(each) for each in parts[1:]):
        return None
    return Position(*map(int, parts[1:]))


def shape_of(parts: Sequence[Part], topic: TopicName) -> str:
    """Equal for two writes whose partitions have equally many rows for the topic."""
    rows = [(part.partition, part.topics.get(str(topic), 0)) for part in parts]
    text = json.dumps([each for each in sorted(rows) if each[1]])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def decide(
    topic: TopicName, run: Run, note: SinkNote | None, origin: str | None, rows: int, digest: int
) -> Decision:
    """What becomes of `rows` rows of the run in the topic; UsageError if that would lose some."""
    if not run.named:
        return Decision(Action.APPEND)
    trusted = note is not None and note.origin == origin
    if note is None:
        return Decision(Action.APPEND, None if origin == ORIGIN_HERE else 0)
    if note.batch < run.batch:
        return Decision(Action.APPEND, None if trusted and note.done else note.offset)
    if note.batch == run.batch and not note.done:
        return Decision(Action.RESUME, note.offset)
    _require_same(topic, run, note, rows, digest)
    return Decision(Action.KNOWN)


def _require_same(topic: TopicName, run: Run, note: SinkNote, rows: int, digest: int) -> None:
    """Rows that are not those of the batch that is there must not be dropped as known."""
    if note.batch > run.batch:
        raise below(topic, run, note.batch)
    other = "they are not the same rows. Give the new rows another sinkId or batchId"
    if note.rows != rows and not (run.streaming and run.batch > 0):
        raise UsageError(
            f"{topic}: batch {run.batch} of the sink {run.sink_id!r} is complete with {note.rows} "
            f"rows, and this one has {rows}: {other}"
        )
    # What a query computes anew may differ from what it computed before its restart; a query
    # that begins, and a batch that is written again, must have the same rows.
    repeated = run.streaming and run.batch > 0
    if note.digest not in (None, digest) and not repeated:
        raise UsageError(
            f"{topic}: batch {run.batch} of the sink {run.sink_id!r} is complete with {rows} other "
            f"rows: {other}"
        )


def below(topic: TopicName, run: Run, reached: int) -> UsageError:
    """Of a write whose number is lower than one that the sink has: was it there, or is it late?"""
    if run.streaming:
        return UsageError(
            f"{topic}: the sink {run.sink_id!r} is at batch {reached}, and this query is at batch "
            f"{run.batch}: it has a new checkpoint, or an old copy of one. Go on with the newest "
            "checkpoint, or give another sinkId"
        )
    return UsageError(
        f"{topic}: the sink {run.sink_id!r} is at batch {reached}, and this is batch {run.batch}: "
        "batches of one sink must ascend. If these rows were never appended, give another sinkId"
    )


def encode_note(note: SinkNote) -> bytes:
    return json.dumps(asdict(note), separators=(",", ":"), sort_keys=True).encode()


def decode_note(data: bytes, what: str) -> SinkNote:
    try:
        note = SinkNote(**json.loads(data))
    except (ValueError, TypeError) as error:
        raise DescriptorError(f"{what} is no note of a sink: {error}") from error
    if not all(_is_offset(each) for each in (note.batch, note.offset, note.rows)):
        raise DescriptorError(f"{what} is no note of a sink: a number is out of range")
    return note


def _is_offset(value: object) -> bool:
    return type(value) is int and 0 <= value <= OFFSET_MAX
