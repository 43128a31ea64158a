"""The codec of ledgers: the compiled module `_native` if it was built, otherwise `pulsar.pure`.

Both return the same results and raise the same errors; only the speed differs. The contracts of
the functions are in `pure`. `forebay.format.codec` says which of the two is used.
"""

from __future__ import annotations

from forebay.format.layout import Buffer
from forebay.format.pulsar import pure
from forebay.format.pulsar.pure import RawEntries

crc32c = pure.crc32c


def scan_entries(buffer: Buffer, start: int, left: int, entry_id: int) -> RawEntries:
    return pure.scan_entries(buffer, start, left, entry_id)
