"""Measures how long common operations take in topics with few and with very many objects.

Each topic has a made-up chain: descriptors with 64 index entries each, of objects that do not exist
but for the one in the middle and the last one. After them comes a small log. So the topics differ
only in the number of descriptors. Each time is the median of the rounds, and the two topics take
turns, because other programs slow a machine down for seconds at a time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import forebay
from forebay.bench.measure import Sweep, progress_line, result_of, scratch
from forebay.catalog.catalog import Catalog
from forebay.catalog.chain import pointer
from forebay.catalog.kv import Put
from forebay.catalog.records import TopicRecord, encode_record
from forebay.format.descriptor import ObjectDescriptor
from forebay.format.frame import encode_frame
from forebay.format.message import MessageId, StreamMessage, encode_message
from forebay.format.names import ObjectName, TopicName, object_key
from forebay.limits import DESCRIPTOR_INDEX_ENTRIES
from forebay.settings import CloudSettings, MetadataSettings, StoreSettings
from forebay.topic.describe import describe
from forebay.topic.resources import StoreResources
from forebay.topic.view import StoreView

TOPIC: Final = TopicName("default", "bench")
MESSAGES: Final = DESCRIPTOR_INDEX_ENTRIES
"""Messages in each object, one for each entry of its index."""
_WRITTEN_AT_ONCE: Final = 30
_PLANNED_OBJECTS: Final = 100
"""Objects of the range that Spark's source plans."""


@dataclass(slots=True)
class _Measured:
    """A topic with a chain of `objects` descriptors, and the seconds that operations took."""

    objects: int
    settings: StoreSettings
    seconds: dict[str, list[float]] = field(default_factory=dict)

    @property
    def middle(self) -> int:
        return self.objects // 2 * MESSAGES

    def run(self) -> None:
        """Measures every operation once."""
        with self._measured("open the store and the topic"):
            store = forebay.open(self.settings)
            topic = store.topic(str(TOPIC))
        with self._measured("append and upload one message"):
            topic.append(b"one more")
            assert len(topic.upload()) == 1
        store.close()
        # Without the local log: what is read comes from objects.
        elsewhere = replace(self.settings, data=Path(str(self.settings.data)) / "elsewhere")
        with StoreView(elsewhere) as view:
            assert len(view.topics()) == 1  # connects
            found = view.topic(str(TOPIC))
            with self._measured("read a message in the middle"):
                at = self.middle + MESSAGES // 2
                with found.reader(at, at + 1) as reader:
                    assert [each.offset for each in reader] == [at]
            with self._measured("describe, the first page"):
                assert len(describe(found).objects) == min(100, self.objects + 1)
            with self._measured(f"plan a scan of {_PLANNED_OBJECTS} objects in the middle"):
                self._plan(view)

    def _plan(self, view: StoreView) -> None:
        from forebay.pipeline.source.plan import plan_topic

        end = self.middle + _PLANNED_OBJECTS * MESSAGES
        pieces = plan_topic(view.topic(str(TOPIC)), self.middle, end)
        assert len(pieces) == _PLANNED_OBJECTS

    def _measured(self, name: str) -> _Timer:
        return _Timer(self.seconds.setdefault(name, []))


@dataclass(slots=True)
class _Timer:
    seconds: list[float]
    started: float = 0.0

    def __enter__(self) -> None:
        self.started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds.append(time.perf_counter() - self.started)


def run(
    directory: Path | None,
    *,
    rounds: int,
    objects: int,
    few: int,
    etcd: str | None,
    progress: bool,
) -> dict[str, Any]:
    """All measurements, as data for `forebay.bench.measure.show`."""
    started = time.time()
    say = progress_line(progress=progress)
    sweeps = []
    with scratch(directory) as home:
        for backend in ("sqlite", "etcd") if etcd else ("sqlite",):
            both = []
            for count in (few, objects):
                say(f"{backend}: writing {count} descriptors")
                both.append(_prepared(home / f"{backend}-{count}", count, backend, etcd))
            for number in range(rounds):
                say(f"{backend}: round {number + 1}/{rounds}")
                for each in both:
                    each.run()
            sweeps.append(_sweep(backend, both))
    say("")
    seconds = time.time() - started
    return result_of(
        "catalog", rounds, directory, sweeps=[each.as_json() for each in sweeps], seconds=seconds
    )


def _sweep(backend: str, measured: list[_Measured]) -> Sweep:
    curves = {
        name: tuple(1000 * statistics.median(each.seconds[name]) for each in measured)
        for name in measured[0].seconds
    }
    values = tuple(float(each.objects) for each in measured)
    return Sweep(
        name=f"catalog-{backend}",
        title=f"operations, {backend}",
        knob="descriptors",
        in_bytes=False,
        values=values,
        unit="ms",
        curves=curves,
    )


# ---- made-up topics ----


def _prepared(data: Path, objects: int, backend: str, etcd: str | None) -> _Measured:
    metadata = MetadataSettings(path=data / "catalog.db")
    if backend == "etcd" and etcd is not None:
        metadata = MetadataSettings(backend="etcd", endpoints=(etcd,), prefix=f"/{data.name}-bench")
    settings = StoreSettings(
        data=data, metadata=metadata, cloud=CloudSettings(root=str(data / "objects"))
    )
    data.mkdir(parents=True)
    resources = StoreResources(settings).open()
    try:
        real = []
        for number in (objects // 2, objects - 1):
            frames = frames_of(number)
            real.append(descriptor_of(number, frames))
            key = object_key(TOPIC, real[-1].object_id)
            resources.store.put_object(key, b"".join(frames))
        write_chain(resources.catalog, objects, real)
    finally:
        resources.close()
    with forebay.open(settings) as store:  # begins the log after the objects
        store.topic(str(TOPIC)).append_many([b"new"] * 10)
        store.topic(str(TOPIC)).upload()
    return _Measured(objects, settings)


def _frame(offset: int) -> bytes:
    message = StreamMessage(b"m%020d" % offset, 0, MessageId(1, str(TOPIC)))
    return encode_frame(offset, encode_message(message, offset))


def frames_of(number: int) -> list[bytes]:
    """The frames of an object."""
    first = number * MESSAGES
    return [_frame(offset) for offset in range(first, first + MESSAGES)]


def descriptor_of(number: int, frames: list[bytes]) -> ObjectDescriptor:
    start = number * MESSAGES
    positions = accumulate(map(len, frames[:-1]), initial=0)
    return ObjectDescriptor(
        str(ObjectName(start, start + MESSAGES - 1)),
        start,
        start + MESSAGES - 1,
        sum(map(len, frames)),
        None,
        1_700_000_000,
        offset_index=tuple((start + at, place) for at, place in enumerate(positions)),
    )


def write_chain(catalog: Catalog, objects: int, real: Collection[ObjectDescriptor]) -> None:
    """Writes the rows of the chain and the topic's record. All objects but `real` are made up."""
    keys, chain = catalog.keys, catalog.chain(TOPIC)
    known = {each.start_offset: each for each in real}
    like = frames_of(objects)
    for first in range(0, objects, _WRITTEN_AT_ONCE):
        numbers = range(first, min(first + _WRITTEN_AT_ONCE, objects))
        made = [known.get(each * MESSAGES) or descriptor_of(each, like) for each in numbers]
        catalog.kv.commit([], chain.changed(made))
    end = objects * MESSAGES
    record = TopicRecord(tail=end, verified=end, reserved=end)
    current = Put(keys.current(TOPIC), pointer(end - MESSAGES))
    catalog.kv.commit([], [Put(keys.record(TOPIC), encode_record(record)), current])
