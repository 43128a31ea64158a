"""Data directories with many small objects, and compactions of them without Spark.

As a program it compacts a directory until `tests/pipeline/jobs/test_compact_kill.py` kills it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, TypeVar

from forebay.catalog.adopt import adopt
from forebay.catalog.catalog import Change
from forebay.catalog.kv import Put
from forebay.catalog.records import TopicRecord, encode_record
from forebay.format.descriptor import ObjectDescriptor, encode_descriptor
from forebay.format.frame import encode_frame, scan
from forebay.format.index import ObjectIndex
from forebay.format.names import ObjectName, TopicName, object_key, sidecar
from forebay.pipeline.execute import Done, Progress
from forebay.pipeline.jobs.compact import CompactReport, compact
from forebay.read.cloud_reader import CloudReader
from forebay.read.tiered_log import CatalogSource
from forebay.settings import StoreSettings, UploaderSettings
from forebay.topic.resources import open_resources
from forebay.upload.sweep import SweepReport, sweep
from support.inline_executor import InlineExecutor
from support.stored_objects import message

TOPIC: Final = TopicName("default", "orders")
CREATED: Final = 1_700_000_000

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class RunsHere(InlineExecutor):
    """One task after the other in this process, by `run`, which may do more than the work."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__(slots=1)
        self._run = run

    def run(
        self,
        tasks: Sequence[Sequence[_Item]],
        work: Callable[[_Item], _Result],
        label: str,
        progress: Progress | None = None,
    ) -> list[list[Done[_Result]]]:
        assert label
        found: list[list[Done[_Result]]] = self._run(tasks, work, progress)
        return found


def here(
    tasks: Sequence[Sequence[_Item]],
    work: Callable[[_Item], _Result],
    progress: Progress | None = None,
) -> list[list[Done[_Result]]]:
    """What an executor does, in this process."""
    return InlineExecutor().run(tasks, work, "here", progress)


class Setup:
    """A data directory as others see it: its catalog and its objects."""

    def __init__(self, data: Path, **uploader: Any) -> None:
        self.settings = StoreSettings(data=data, uploader=UploaderSettings(**uploader))
        self.bench = open_resources(self.settings)
        self.catalog = self.bench.catalog
        self.store = self.bench.store

    # ---- what there is ----

    def create(self, topic: TopicName = TOPIC, **fields: Any) -> None:
        record = TopicRecord(**{"epoch": 1, "log_id": "log", "reserved": 10**9, **fields})
        put = Put(self.catalog.keys.record(topic), encode_record(record))
        assert self.catalog.kv.commit([], [put]) is not None

    def lay(
        self, bounds: Sequence[int], topic: TopicName = TOPIC, *, sidecars: bool = True
    ) -> list[ObjectDescriptor]:
        """Objects between each two neighbours of `bounds`, committed and read back."""
        if self.catalog.record(topic) is None:
            self.create(topic)
        made = [self._write(topic, start, after) for start, after in pairwise(bounds)]
        for each in made if sidecars else []:
            key = object_key(topic, sidecar(each.object_id))
            self.store.put_object(key, encode_descriptor(each))
        adopt(self.catalog, topic, 1, made)
        self.catalog.update(topic, 1, lambda record: Change(replace(record, verified=record.tail)))
        return made

    def _write(self, topic: TopicName, start: int, after: int) -> ObjectDescriptor:
        data = b"".join(encode_frame(at, message(at)) for at in range(start, after))
        name = str(ObjectName(start, after - 1))
        meta = self.store.put_object(object_key(topic, name), data)
        index = ObjectIndex()
        index.add(scan(data), 0)
        return ObjectDescriptor(
            name,
            start,
            after - 1,
            len(data),
            meta.etag,
            CREATED + start,
            offset_index=index.frozen(),
        )

    def record(self, topic: TopicName = TOPIC) -> TopicRecord:
        record = self.catalog.record(topic)
        assert record is not None
        return record

    def chain(self, topic: TopicName = TOPIC) -> list[ObjectDescriptor]:
        return list(self.catalog.get_object_descriptors(topic))

    def ranges(self, topic: TopicName = TOPIC) -> list[tuple[int, int]]:
        return [(each.start_offset, each.end_offset) for each in self.chain(topic)]

    def names(self, topic: TopicName = TOPIC) -> list[str]:
        prefix = object_key(topic, "")
        return sorted(meta.key.removeprefix(prefix) for meta in self.store.list(prefix))

    # ---- what is done ----

    def compacted(self, target: int = 10**6, **options: Any) -> CompactReport:
        executor = RunsHere(options.pop("run", here))
        return compact(self.settings, target_bytes=target, executor=executor, **options)

    def swept(self, grace_minutes: float = 0.0) -> SweepReport:
        return sweep(self.catalog, self.store, [TOPIC], grace_minutes=grace_minutes, dry_run=False)

    @contextmanager
    def reader(self, topic: TopicName = TOPIC) -> Iterator[CloudReader]:
        source = CatalogSource(self.catalog, topic)
        reading = self.settings.cloud_reader
        with CloudReader(topic, self.store, source, reading, self.bench.pool) as reader:
            yield reader

    def require_readable(self, count: int, topic: TopicName = TOPIC, start: int = 0) -> None:
        """Every message is there once, in order, and the chain is whole (I3, I4)."""
        with self.reader(topic) as reader:
            found = [each.payload for each in reader.read_range(start)]
        assert found == [b"m%d" % at for at in range(start, count)]
        chain = self.chain(topic)
        assert all(one.next_offset == then.start_offset for one, then in pairwise(chain))
        for each in chain:
            assert self.store.head(object_key(topic, each.object_id)).size == each.size

    def close(self) -> None:
        self.bench.close()


def main() -> None:
    data, target = sys.argv[1:]
    sys.stdout.write("begun\n")
    sys.stdout.flush()
    report = compact(
        StoreSettings(data=Path(data)), target_bytes=int(target), executor=RunsHere(here)
    )
    sys.stdout.write(f"{'done' if report.ok else 'failed'} {len(report.rows)}\n")


if __name__ == "__main__":
    main()
