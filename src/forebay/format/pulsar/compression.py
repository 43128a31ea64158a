"""Decompresses what Pulsar's producers compress: LZ4, ZLIB, ZSTD and SNAPPY.

    LZ4, SNAPPY   one raw block, without a header that says its size
    ZLIB          a stream that ends with a sync flush and is never finished
    ZSTD          one frame, which need not say its size

The size is in the metadata of the entry. A payload that has another one is refused, and no more
memory is allocated than it says. LZ4 and SNAPPY need the package cramjam, which the extra `pulsar`
installs; it is imported when the first such payload is met.

Beware: `zlib.decompress` fails on every ZLIB payload of Pulsar, because the stream has no end.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any, Final

from forebay.errors import LedgerError, UsageError
from forebay.format.blocks import decompress_frame
from forebay.format.layout import Buffer
from forebay.format.pulsar.entry import Compression
from forebay.limits import PULSAR_MESSAGE_BYTES_MAX


def decompress(kind: int, stored: Buffer, raw_bytes: int) -> Buffer:
    """Returns the `raw_bytes` bytes that `stored` was compressed from.

    LedgerError if that cannot be, for an unknown `kind`, or if it is over the limit. UsageError if
    a package is missing.
    """
    if kind == Compression.NONE:
        return stored
    if kind not in _DECOMPRESS:
        raise LedgerError(f"the compression {kind} is not known")
    name = Compression(kind).name
    if raw_bytes > PULSAR_MESSAGE_BYTES_MAX:
        raise LedgerError(
            f"the {name} payload has {raw_bytes} bytes without compression; at most "
            f"{PULSAR_MESSAGE_BYTES_MAX} are allowed"
        )
    try:
        raw = _DECOMPRESS[kind](stored, raw_bytes)
    except UsageError:  # which is a ValueError too
        raise
    except (ValueError, zlib.error) as error:
        raise LedgerError(f"the {name} payload cannot be decompressed: {error}") from error
    if len(raw) != raw_bytes:
        raise LedgerError(
            f"the {name} payload has {len(raw)} bytes without compression, not {raw_bytes} as its "
            "metadata say"
        )
    return raw


def _lz4(stored: Buffer, raw_bytes: int) -> Buffer:
    found = _cramjam("LZ4")
    return _into(found, found.lz4.decompress_block_into, stored, raw_bytes)


def _snappy(stored: Buffer, raw_bytes: int) -> Buffer:
    found = _cramjam("SNAPPY")
    return _into(found, found.snappy.decompress_raw_into, stored, raw_bytes)


def _into(found: Any, function: Any, stored: Buffer, raw_bytes: int) -> Buffer:
    raw = bytearray(raw_bytes)
    try:
        size = function(stored, raw)
    except found.DecompressionError as error:
        raise ValueError(str(error)) from error
    return memoryview(raw)[:size]


def _zlib(stored: Buffer, raw_bytes: int) -> bytes:
    return zlib.decompressobj().decompress(stored, raw_bytes + 1)


def _cramjam(name: str) -> Any:
    try:
        import cramjam
    except ImportError as error:
        raise UsageError(
            f"a message is compressed with {name}, which needs the package cramjam: install "
            "forebay[pulsar], on every executor"
        ) from error
    return cramjam


_DECOMPRESS: Final[Mapping[int, Callable[[Buffer, int], Buffer]]] = {
    Compression.LZ4: _lz4,
    Compression.ZLIB: _zlib,
    Compression.ZSTD: decompress_frame,
    Compression.SNAPPY: _snappy,
}
