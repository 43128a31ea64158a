"""`ContentHash`: what tells the content of an object apart from any other content.

It is the SHA-256 of all frames of the object, each with its 16-byte header, before compression. How
the bytes were cut into chunks makes no difference, so a process that reads or writes an object in
pieces hashes them as they pass.

Beware: the frames of a compacted object are those of its sources, but its hash is not made of
theirs. A compaction hashes each source, and the result once more.
"""

from __future__ import annotations

from hashlib import sha256

from forebay.format.layout import Buffer


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
