"""`SidecarIndexes`: the whole index of an object, from its sidecar, for a read that starts inside.

A descriptor in the catalog has few entries of its object's index, so that lookups stay small. In a
large object they may be further apart than one request fetches. A stream that starts between two
of them then gets the whole index from the sidecar, with one small request, instead of the bytes in
between.

Beware: a sidecar is a hint. If it is missing, damaged or for other bytes, the descriptor is used as
it is. A sidecar whose index is wrong in a way that only the frames show is found by the stream,
which then goes on without it (`ObjectStream`).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import replace
from typing import Final, Protocol

from forebay.errors import DescriptorError, ServiceError, ServiceUnavailable
from forebay.format.descriptor import ObjectDescriptor, decode_descriptor, like
from forebay.format.layout import Buffer
from forebay.format.names import TopicName, object_key, sidecar
from forebay.interrupts import holding
from forebay.limits import BLOCK_BYTES, DESCRIPTOR_BYTES_MAX, OBJECT_INDEX_BYTES
from forebay.objects.backend import ObjectMeta
from forebay.read.metrics import counted_request

_CACHED_MAX: Final = 8
"""Indexes that are kept: at most half a megabyte each."""
_GAP_BYTES_MIN: Final = 2 * OBJECT_INDEX_BYTES
"""The whole index has entries closer than this, unless a message is larger."""


def _gap_max(descriptor: ObjectDescriptor, fetch_bytes: int) -> int:
    if descriptor.codec is None:  # an entry of a ledger has one place, as a frame has
        return max(fetch_bytes, _GAP_BYTES_MIN)
    blocks = -(-descriptor.logical_size // BLOCK_BYTES)
    return 2 * descriptor.size // max(blocks, 1)


class SidecarStore(Protocol):
    """The part of `forebay.objects.backend.Backend` that reads sidecars."""

    def head(self, key: str) -> ObjectMeta: ...

    def get_range(self, key: str, start: int, end: int) -> Buffer: ...


class SidecarIndexes:
    """Reads indexes from sidecars and keeps a few of them. Thread-safe."""

    def __init__(self, store: SidecarStore) -> None:
        self._store = store
        self._lock = threading.RLock()
        self._cached: OrderedDict[tuple[TopicName, ObjectDescriptor], ObjectDescriptor] = (
            OrderedDict()
        )

    def refined(
        self, topic: TopicName, descriptor: ObjectDescriptor, offset: int, fetch_bytes: int
    ) -> ObjectDescriptor:
        """Returns the descriptor with its whole index, if that saves bytes to find `offset`.

        It does if the known entries around the offset are more than `fetch_bytes` apart, or two
        blocks in a compressed object. Never raises: without a good sidecar the descriptor is
        returned as it is.
        """
        gap = descriptor.position_after(offset) - descriptor.seek(offset)[1]
        if not descriptor.offset_index or gap <= _gap_max(descriptor, fetch_bytes):
            return descriptor
        key = (topic, descriptor)
        known = holding(self._lock, lambda: self._recall(key))
        if known is not None:
            return known
        try:
            found = self._read(topic, descriptor)
        except ServiceUnavailable:
            return descriptor  # not kept: the next read tries again
        holding(self._lock, lambda: self._remember(key, found))
        return found

    def _recall(self, key: tuple[TopicName, ObjectDescriptor]) -> ObjectDescriptor | None:
        known = self._cached.get(key)
        if known is not None:
            self._cached.move_to_end(key)
        return known

    def _remember(self, key: tuple[TopicName, ObjectDescriptor], found: ObjectDescriptor) -> None:
        self._cached[key] = found
        while len(self._cached) > _CACHED_MAX:
            self._cached.popitem(last=False)

    def _read(self, topic: TopicName, descriptor: ObjectDescriptor) -> ObjectDescriptor:
        try:
            key = object_key(topic, sidecar(descriptor.object_id))
            size = self._store.head(key).size
            if not 0 < size <= DESCRIPTOR_BYTES_MAX:
                return descriptor
            with counted_request():
                data = self._store.get_range(key, 0, size)
            said = decode_descriptor(bytes(data))
        except ServiceUnavailable:
            raise
        except (ServiceError, DescriptorError):
            return descriptor
        whole = said.offset_index or ()
        same = replace(like(said, descriptor), offset_index=descriptor.offset_index)
        if same != descriptor or not set(descriptor.offset_index or ()) <= set(whole):
            return descriptor
        return replace(descriptor, offset_index=whole)
