"""A small log of frames, and how to take frames apart, for the suites of frames."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final, TypeAlias

from forebay.format.frame import HEADER_BYTES, FrameDecoder, Scan, encode_frame

Frames: TypeAlias = list[tuple[int, bytes]]

PAYLOADS: Final = [b"0123456789", bytes(range(37)), bytes(10), b"\xff" * 300, b"ends-here!"]
FIRST: Final = 7
LOG: Final = b"".join(encode_frame(FIRST + n, payload) for n, payload in enumerate(PAYLOADS))
BOUNDS: Final = [0]
for _payload in PAYLOADS:
    BOUNDS.append(BOUNDS[-1] + HEADER_BYTES + len(_payload))


def frames_of(found: Scan) -> Frames:
    return [(offset, bytes(payload)) for offset, payload in found]


def fed(decoder: FrameDecoder, chunks: Iterable[bytes]) -> tuple[Frames, Scan]:
    """All frames of the chunks, and how the last feed ended."""
    frames: Frames = []
    last = decoder.feed(b"")
    for chunk in chunks:
        last = decoder.feed(chunk)
        frames += frames_of(last)
    return frames, last


def header(offset: int, length: int, crc: int = 0) -> bytes:
    return struct.pack("<QI", offset, length) + struct.pack("<I", crc)
