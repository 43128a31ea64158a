"""What is known about the content of an object: `ContentHash`, `MessageSurvey` and `first_at`.

The hash tells the content of an object apart from any other content. It is the SHA-256 of all
frames of the object, each with its 16-byte header, before compression. How the bytes were cut into
chunks makes no difference, so a process that reads or writes an object in pieces hashes them as
they pass. The survey looks at the messages in the frames without decoding them.

Beware: the frames of a compacted object are those of its sources, but its hash is not made of
theirs. A compaction hashes each source, and the result once more.
"""

from __future__ import annotations

from bisect import bisect_left
from hashlib import sha256

from forebay.format import codec
from forebay.format.frame import Scan
from forebay.format.layout import Buffer
from forebay.limits import OFFSET_MAX


class ContentHash:
    """Hashes the frames of one object, in order."""

    __slots__ = ("_digest",)

    def __init__(self) -> None:
        self._digest = sha256()

    def add(self, raw: Buffer) -> None:
        """Adds bytes of the object, in any cut. Releases the GIL for all but small ones."""
        self._digest.update(raw)

    @property
    def value(self) -> str:
        """The hash of what was added so far, as a descriptor has it: `sha256:` and 64 digits."""
        return f"sha256:{self._digest.hexdigest()}"


class MessageSurvey:
    """Looks at all messages of one object: at their publish times, and at their topic names."""

    __slots__ = ("_highest", "_topic", "foreign_offset")

    def __init__(self, topic: str = "") -> None:
        self._topic = topic.encode()
        self._highest: int | None = 0
        self.foreign_offset: int | None = None
        """The first message that names another topic. Without a topic every name is another."""

    def add(self, frames: Scan) -> None:
        if self._highest is None or not len(frames):
            return
        highest, bad, foreign = codec.survey(
            frames.buffer, frames.positions, frames.lengths, self._topic
        )
        self._highest = max(self._highest, highest) if bad < 0 else None
        if self.foreign_offset is None and foreign >= 0:
            self.foreign_offset = frames.offsets[foreign]

    @property
    def highest_publish_time(self) -> int | None:
        """In milliseconds; None if a message cannot be decoded, or its time fits no descriptor."""
        highest = self._highest
        return highest if highest is not None and highest <= OFFSET_MAX else None


def first_at(frames: Scan, time_ms: int) -> int | None:
    """Returns the index of the first message that was published at `time_ms` or later, or None.

    Messages that cannot be decoded do not count.
    """
    first = 0
    while first < len(frames):
        highest, bad = _highest(frames, first, len(frames))
        end = len(frames) if bad < 0 else first + bad
        if highest >= time_ms and end > first:
            # The highest time of the messages up to `last` never falls as `last` grows.
            after = range(first + 1, end + 1)
            at = bisect_left(after, time_ms, key=lambda stop: _highest(frames, first, stop)[0])
            return first + at
        first = end + 1
    return None


def _highest(frames: Scan, first: int, stop: int) -> tuple[int, int]:
    """The highest publish time of some messages, and the index of the first damaged one or -1."""
    positions, lengths = frames.positions[first:stop], frames.lengths[first:stop]
    highest, bad, _ = codec.survey(frames.buffer, positions, lengths, b"")
    return highest, bad
