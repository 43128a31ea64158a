"""One object on its way: what an executor is given, what it does, and what it answers.

The same function runs on Spark's executors and in any other pool of processes. It is done again
when a worker dies, and sometimes twice at the same time: an object's name says which bytes it
has, so both write the same ones, and an object is invisible until it is whole. It commits
nothing.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TypeAlias

from forebay.catalog.catalog import Intent
from forebay.errors import ForebayError, ServiceUnavailable
from forebay.format.descriptor import ObjectDescriptor
from forebay.format.names import SegmentNames, TopicName
from forebay.pipeline.resources import executor_resources
from forebay.read.verify import looks_same, verify_object
from forebay.settings import StoreSettings
from forebay.topic.resources import StoreResources
from forebay.upload.plan import PlannedObject, SegmentSource
from forebay.upload.transfer import describe, put_sidecar, transfer


@dataclass(frozen=True, slots=True)
class Shipment:
    """An object to be made."""

    topic: TopicName
    intent: Intent
    planned: PlannedObject
    log_id: str | None = None
    """Of the log whose segments were planned; None: the catalog knows none."""

    @property
    def size(self) -> int:
        return self.planned.size


@dataclass(frozen=True, slots=True)
class Inspection:
    """A committed object that nobody has read back yet."""

    topic: TopicName
    descriptor: ObjectDescriptor

    @property
    def size(self) -> int:
        return self.descriptor.size


Errand: TypeAlias = Shipment | Inspection


@dataclass(frozen=True, slots=True)
class Shipped:
    """An object that is in its place, and as it should be; whether it counts is not said here."""

    descriptor: ObjectDescriptor
    seconds: float


def run_errand(settings: StoreSettings, errand: Errand) -> Shipped:
    """Makes an object, or looks at one; raises unless it is there and right in the end."""
    started = time.monotonic()
    bench = executor_resources(settings)
    descriptor = _ship(bench, errand) if isinstance(errand, Shipment) else errand.descriptor
    _require_right(bench, errand.topic, descriptor)
    if isinstance(errand, Shipment) and settings.uploader.sidecars:
        put_sidecar(bench.store, errand.topic, descriptor)
    return Shipped(descriptor, time.monotonic() - started)


def _ship(bench: StoreResources, shipment: Shipment) -> ObjectDescriptor:
    settings = bench.settings
    planned, object_id = shipment.planned, shipment.intent.object_id
    try:
        disk = bench.segments_of(shipment.topic, shipment.log_id)
        source = SegmentSource(disk, SegmentNames(settings.wal.file_name))
        moved = transfer(bench.store, source, shipment.topic, object_id, planned, settings.uploader)
    except OSError as error:
        if isinstance(error, ForebayError):
            raise
        raise ServiceUnavailable(f"{shipment.topic}: a segment cannot be read: {error}") from error
    return describe(
        object_id, planned.start_offset, planned.next_offset, moved, bench.clock.now_ms()
    )


def _require_right(bench: StoreResources, topic: TopicName, descriptor: ObjectDescriptor) -> None:
    """Reads the object back, or looks whether it is there, as configured."""
    settings = bench.settings
    if settings.uploader.verify_after_upload or not looks_same(bench.store, topic, descriptor):
        verify_object(bench.store, bench.pool, settings.cloud_reader, topic, descriptor)
