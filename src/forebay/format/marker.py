"""`BeginMarker`: a small object that records the opening of a topic's log, as JSON.

The object store alone then tells two things. Offsets up to `limits.LOG_DISTANCE` after the newest
marker may have been assigned, so a restore continues after them (rule R9). And a local log that
does not have the nonce of the newest marker is an older copy (rule R11). The layout is in
`docs/formats/marker.md`.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from typing import Final

from forebay.errors import FormatError
from forebay.limits import OFFSET_MAX

MARKER_BYTES_MAX: Final = 4096
_ID: Final = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class BeginMarker:
    log_id: str
    """The log that was opened."""
    nonce: str
    """The nonce of this opening."""
    epoch: int
    """The epoch of the owner that opened it."""
    begin: int
    """The offset at which the log begins: offsets before it are in other logs or in objects."""
    deleted: bool = False
    """The topic was deleted: no message before `begin` is in it, and no log begins here yet."""


def encode_marker(marker: BeginMarker) -> bytes:
    body = asdict(marker)
    if not marker.deleted:  # as earlier releases write it
        del body["deleted"]
    return json.dumps(body, separators=(",", ":"), sort_keys=True).encode()


def decode_marker(data: bytes, what: str) -> BeginMarker:
    """Decodes a marker; ignores unknown fields. `what` names it in the FormatError."""
    if len(data) > MARKER_BYTES_MAX:
        raise FormatError(f"{what} has {len(data)} bytes; at most {MARKER_BYTES_MAX} are allowed")
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{what}: it is not JSON: {error}") from error
    match body:
        case {
            "log_id": str() as log_id,
            "nonce": str() as nonce,
            "epoch": int() as epoch,
            "begin": int() as begin,
        } if _ID.fullmatch(log_id) and _ID.fullmatch(nonce):
            if not (0 <= epoch <= OFFSET_MAX and 0 <= begin <= OFFSET_MAX):
                raise FormatError(f"{what}: a number is not in 0..{OFFSET_MAX}")
            return BeginMarker(log_id, nonce, epoch, begin, body.get("deleted") is True)
    raise FormatError(f"{what}: it does not have the fields of a begin marker")
