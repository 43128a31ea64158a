from collections.abc import Mapping, Sequence

from forebay.format.layout import Buffer

def scan(
    buffer: Buffer, start: int, expected: int, consecutive: bool, /
) -> tuple[bytes, bytes, bytes, int, int, int | None]: ...
def find_frames(
    buffer: Buffer, stop: int, total: int, first: int, last: int, messages_only: bool, limit: int, /
) -> tuple[bytes, bytes, int]: ...
def columns(
    buffer: Buffer, positions: Buffer, lengths: Buffer, /
) -> tuple[bytes, bytes, bytes, bytes, bytes, bytes, bytes, bytes, bytes, int]: ...
def survey(
    buffer: Buffer, positions: Buffer, lengths: Buffer, topic: Buffer, /
) -> tuple[int, int, int]: ...
def gather(
    buffer: Buffer, positions: Buffer, lengths: Buffer, /
) -> tuple[bytes, bytes, bytes | None]: ...
def append_one(
    run: bytearray,
    first_offset: int,
    head: bytes,
    middle: bytes,
    payload: Buffer,
    publish_time: int,
    attributes: Mapping[str, str] | None,
    routing_key: str | None,
    /,
) -> int: ...
def encode_many(
    head: bytes,
    middle: bytes,
    offset: int,
    payloads: Sequence[Buffer],
    index: int,
    publish_time: int,
    attributes: Sequence[Mapping[str, str] | None] | None,
    routing_keys: Sequence[str | None] | None,
    bytes_max: int,
    /,
) -> tuple[bytes, int]: ...
def crc32c(data: Buffer, /) -> int: ...
def scan_entries(
    buffer: Buffer, start: int, left: int, entry_id: int, /
) -> tuple[bytes, bytes, int, int]: ...
def pack_frames(
    buffer: Buffer,
    positions: Buffer,
    lengths: Buffer,
    row: int,
    offset: int,
    entry_id: int,
    block: bytearray | memoryview,
    at: int,
    /,
) -> tuple[int, int, bytes, int]: ...
def unpack_frames(
    buffer: Buffer, positions: Buffer, lengths: Buffer, row: int, offset: int, bytes_max: int, /
) -> tuple[bytes, bytes, bytes, int, int]: ...
def entry_columns(buffer: Buffer, positions: Buffer, lengths: Buffer, /) -> tuple[bytes, bytes]: ...
def check_entries(buffer: Buffer, positions: Buffer, lengths: Buffer, row: int, /) -> int: ...
def pack_entries(
    entries: list[Buffer], index: int, entry_id: int, block: bytearray | memoryview, at: int, /
) -> tuple[int, int, int]: ...
def batch_columns(
    buffer: Buffer, positions: Buffer, lengths: Buffer, counts: Buffer, /
) -> tuple[bytes, bytes] | None: ...
