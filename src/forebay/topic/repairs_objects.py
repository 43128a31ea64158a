"""The objects of a topic as a repair sees them: what is wrong with them, and what of them can be
read.

An object that overlaps the local log is read in full, as segments could put it right. The others
are looked at: there, and of their size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, TypeAlias

from forebay.errors import DescriptorError, ObjectMissing, ServiceError
from forebay.format.descriptor import ObjectDescriptor, decode_descriptor
from forebay.format.names import TopicName, object_key, sidecar
from forebay.limits import DESCRIPTOR_BYTES_MAX
from forebay.read.verify import FaultKind, examine_object
from forebay.topic.repairs_apply import Copies, rewrite_object
from forebay.topic.repairs_frames import ObjectBytes, Run, find_runs
from forebay.topic.repairs_plan import Finding, Kind, ObjectRewrite, plan_object
from forebay.topic.tiers import Tiers
from forebay.upload.transfer import put_sidecar

_INDEX: Final = "none: its frames are right, and its descriptor's index is not; compact it"

Repair: TypeAlias = tuple[Callable[[], None], Finding]
"""What is wrong, and what would put it right if it is fixable."""


class Objects:
    def __init__(self, tiers: Tiers, topic: TopicName, copies: Copies) -> None:
        self._tiers = tiers
        self._store = tiers.store
        self._topic = topic
        self._copies = copies

    def runs(self, start: int, end: int) -> list[Run]:
        """Runs of the committed objects that overlap the range; of a missing one none."""
        found: list[Run] = []
        for each in self._tiers.catalog.descriptors(self._topic, start, end):
            found += self._runs_of(each)
        return found

    def _runs_of(self, descriptor: ObjectDescriptor) -> list[Run]:
        try:
            source = ObjectBytes(self._store, self._key(descriptor))
        except ObjectMissing:
            return []
        start, end = descriptor.start_offset, descriptor.next_offset
        return list(find_runs(source, start, end, str(self._topic)))

    def _key(self, descriptor: ObjectDescriptor) -> str:
        return object_key(self._topic, descriptor.object_id)

    def look(self, local: Sequence[Run]) -> Iterator[Repair]:
        """Damaged and missing objects; `local` is what the log holds."""
        for descriptor in self._tiers.catalog.all_descriptors(self._topic):
            fault = self._fault(descriptor, local)
            if fault is None:
                continue
            runs = [*local, *self._runs_of(descriptor)]
            key = self._key(descriptor)
            wanted, finding = plan_object(str(self._topic), key, descriptor, fault[1], runs)
            if fault[0] is FaultKind.INDEX or wanted is None:
                if wanted is not None:
                    finding = replace(finding, fixable=False, remedy=_INDEX)
                yield _nothing, finding
            else:
                yield partial(self._rewrite, wanted), finding

    def _rewrite(self, wanted: ObjectRewrite) -> None:
        rewrite_object(self._tiers, self._topic, wanted, self._copies)

    def _fault(
        self, descriptor: ObjectDescriptor, local: Sequence[Run]
    ) -> tuple[FaultKind, str] | None:
        start, end = descriptor.start_offset, descriptor.next_offset
        if any(run.first < end and run.end > start for run in local):
            reader = self._tiers.settings.cloud_reader
            seen = examine_object(self._store, self._tiers.pool, reader, self._topic, descriptor)
            return None if seen.fault is None else (seen.fault.kind, str(seen.fault.error))
        try:
            size = self._store.head(self._key(descriptor)).size
        except ObjectMissing:
            return FaultKind.MISSING, "it is missing, and the catalog counts on it"
        if size == descriptor.size:
            return None
        return FaultKind.RESIZED, f"it has {size} bytes, its descriptor says {descriptor.size}"

    # -- sidecars -------------------------------------------------------------------------------

    def look_at_sidecars(self) -> Iterator[Repair]:
        if not self._tiers.settings.uploader.sidecars:
            return
        for descriptor in self._tiers.catalog.all_descriptors(self._topic):
            key = object_key(self._topic, sidecar(descriptor.object_id))
            what = self._sidecar_fault(key, descriptor)
            if what is not None:
                remedy = "it is written again from the catalog"
                finding = Finding(str(self._topic), Kind.SIDECAR, key, what, remedy)
                yield partial(self._put_sidecar, descriptor, key), finding

    def _sidecar_fault(self, key: str, descriptor: ObjectDescriptor) -> str | None:
        try:
            found = decode_descriptor(bytes(self._store.get(key, DESCRIPTOR_BYTES_MAX)))
        except ObjectMissing:
            return "it is missing"
        except (DescriptorError, ServiceError) as error:
            return f"it is damaged: {error}"
        # A restore may have made the descriptor anew, with another time and etag.
        same = replace(found, etag=descriptor.etag, created_at=descriptor.created_at)
        return None if same == descriptor else "it says something else than the catalog"

    def _put_sidecar(self, descriptor: ObjectDescriptor, key: str) -> None:
        self._copies.keep_object(self._topic, self._store, key)
        put_sidecar(self._store, self._topic, descriptor)


def _nothing() -> None: ...
