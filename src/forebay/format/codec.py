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


_compiled: Final = _find_compiled()
COMPILED: Final = _compiled is not None


def scan(buffer: Buffer, start: int, expected: int, consecutive: bool) -> RawScan:
    if _compiled is None:
        return pure.scan(buffer, start, expected, consecutive)
    offsets, positions, lengths, *rest = _compiled.scan(buffer, start, expected, consecutive)
    return (
        memoryview(offsets).cast("Q"),
        memoryview(positions).cast("Q"),
        memoryview(lengths).cast("I"),
        *rest,
    )


def find_frames(
    buffer: Buffer, stop: int, total: int, first: int, last: int, messages_only: bool, limit: int
) -> RawFound:
    if _compiled is None:
        return pure.find_frames(buffer, stop, total, first, last, messages_only, limit)
    found = _compiled.find_frames(buffer, stop, total, first, last, messages_only, limit)
    offsets, positions, resume = found
    return memoryview(offsets).cast("Q"), memoryview(positions).cast("Q"), resume


def columns(buffer: Buffer, positions: memoryview, lengths: memoryview) -> RawColumns:
    if _compiled is None:
        return pure.columns(buffer, positions, lengths)
    times, *places, flavours, bad = _compiled.columns(buffer, positions, lengths)
    signed = [memoryview(column).cast("q") for column in places]
    return (memoryview(times).cast("Q"), *signed, memoryview(flavours), bad)


survey = pure.survey if _compiled is None else _compiled.survey
gather = pure.gather if _compiled is None else _compiled.gather
append_one = pure.append_one if _compiled is None else _compiled.append_one
encode_many = pure.encode_many if _compiled is None else _compiled.encode_many
