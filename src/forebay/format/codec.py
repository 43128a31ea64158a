"""The frame codec: the compiled module `_native` if it was built, otherwise the Python one, `pure`.

Both return the same results and raise the same errors; only the speed differs. `COMPILED` says
which is used. The contracts of the functions are in `pure`.

Beware: the choice is made at import. Set `FOREBAY_PURE=1` in the environment before the first
import to use `pure` in any case.
"""

from __future__ import annotations

import os
from types import ModuleType
from typing import Final

from forebay.format import pure
from forebay.format.layout import Buffer
from forebay.format.pure import RawColumns, RawFound, RawScan


def _find_compiled() -> ModuleType | None:
    if os.environ.get("FOREBAY_PURE", "0") not in {"", "0"}:
        return None
    try:
        from forebay.format import _native
    except ImportError:
        return None
    return _native


compiled: Final = _find_compiled()
COMPILED: Final = compiled is not None


def scan(buffer: Buffer, start: int, expected: int, consecutive: bool) -> RawScan:
    if compiled is None:
        return pure.scan(buffer, start, expected, consecutive)
    offsets, positions, lengths, *rest = compiled.scan(buffer, start, expected, consecutive)
    return (
        memoryview(offsets).cast("Q"),
        memoryview(positions).cast("Q"),
        memoryview(lengths).cast("I"),
        *rest,
    )


def find_frames(
    buffer: Buffer, stop: int, total: int, first: int, last: int, messages_only: bool, limit: int
) -> RawFound:
    if compiled is None:
        return pure.find_frames(buffer, stop, total, first, last, messages_only, limit)
    found = compiled.find_frames(buffer, stop, total, first, last, messages_only, limit)
    offsets, positions, resume = found
    return memoryview(offsets).cast("Q"), memoryview(positions).cast("Q"), resume


def columns(buffer: Buffer, positions: memoryview, lengths: memoryview) -> RawColumns:
    if compiled is None:
        return pure.columns(buffer, positions, lengths)
    times, *places, flavours, bad = compiled.columns(buffer, positions, lengths)
    signed = [memoryview(column).cast("q") for column in places]
    return (memoryview(times).cast("Q"), *signed, memoryview(flavours), bad)


survey = pure.survey if compiled is None else compiled.survey
gather = pure.gather if compiled is None else compiled.gather
append_one = pure.append_one if compiled is None else compiled.append_one
encode_many = pure.encode_many if compiled is None else compiled.encode_many
