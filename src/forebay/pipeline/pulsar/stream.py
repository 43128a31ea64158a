"""`spark.readStream.format("pulsar-offload")`: ledgers that appear in a bucket are new data.

The position of a stream is the set of the ledgers that it has read (`seen`), because they appear in
any order. A batch is the difference of two positions, so a batch that is run again after a restart
reads the same ledgers. Spark keeps the position in its checkpoint, nothing else does.

A ledger is there once its index object is. Spark keeps one `PulsarStreamReader` for each query, in
a separate process, which plans; it makes another one in every task, which only reads.

Beware: every trigger lists the whole prefix. Choose an interval of minutes for a large bucket.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxFiles,
    SupportsTriggerAvailableNow,
)

from forebay.errors import MissingData, UsageError
from forebay.logs import event
from forebay.objects.store import CloudStore, connect
from forebay.pipeline.pulsar.bucket import Bucket, Ledger
from forebay.pipeline.pulsar.options import PulsarOptions
from forebay.pipeline.pulsar.plan import in_time, splits
from forebay.pipeline.pulsar.scan import read_split
from forebay.pipeline.pulsar.seen import Seen, decode_seen, encode_seen

if TYPE_CHECKING:
    import pyarrow as pa

_log: Final = logging.getLogger("forebay.pipeline")
_SHOWN: Final = 5


def admitted(new: Sequence[Ledger], ledgers_max: int | None, bytes_max: int | None) -> list[Ledger]:
    """The ledgers of the next batch: those with the lowest numbers, at least one of them."""
    chosen: list[Ledger] = []
    size = 0
    for ledger in sorted(new, key=lambda each: (each.ledger_id, each.topic)):
        size += ledger.size
        over = bytes_max is not None and size > bytes_max
        if chosen and (over or (ledgers_max is not None and len(chosen) >= ledgers_max)):
            break
        chosen.append(ledger)
    return chosen


def unread(ledgers: Sequence[Ledger], seen: Seen) -> list[Ledger]:
    empty: frozenset[int] = frozenset()
    return [each for each in ledgers if each.ledger_id not in seen.get(str(each.topic), empty)]


def with_read(seen: Seen, ledgers: Sequence[Ledger]) -> Seen:
    found = {topic: set(numbers) for topic, numbers in seen.items()}
    for ledger in ledgers:
        found.setdefault(str(ledger.topic), set()).add(ledger.ledger_id)
    return {topic: frozenset(numbers) for topic, numbers in found.items()}


class PulsarStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The source of one streaming query."""

    def __init__(self, options: PulsarOptions) -> None:
        self._options = options
        self._store: CloudStore | None = None
        self._bucket: Bucket | None = None
        self._there: list[Ledger] = []
        """All subscribed ledgers, as of the last look."""
        self._target: set[tuple[object, int]] | None = None
        """What a query with trigger(availableNow=True) reads."""
        self._warned: set[str] = set()

    def _look(self) -> list[Ledger]:
        """The ledgers that are there and wanted."""
        if self._bucket is None:
            self._store = connect(self._options.cloud)
            fail = self._options.fail_on_data_loss
            self._bucket = Bucket(self._store, fail_on_data_loss=fail)
        there = self._bucket.look()
        self._there = [ledger for ledger in there if self._options.matches(ledger.topic)]
        return in_time(self._there, self._options)

    # ---- how far to go

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        return {}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """The limit of ledgers or of bytes. If both are given, `_admit` applies bytes as well."""
        options = self._options
        if options.ledgers_per_trigger is not None:
            return ReadMaxFiles(options.ledgers_per_trigger)
        if options.bytes_per_trigger is not None:
            return ReadMaxBytes(options.bytes_per_trigger)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._target = {ledger.id for ledger in self._look()}

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        seen = decode_seen(start)
        new = unread(self._look(), seen)
        if self._target is not None:
            new = [ledger for ledger in new if ledger.id in self._target]
        return encode_seen(with_read(seen, self._admit(new, limit)))

    def _admit(self, new: Sequence[Ledger], limit: ReadLimit) -> list[Ledger]:
        if isinstance(limit, ReadAllAvailable):
            return list(new)
        if not isinstance(limit, ReadMaxFiles | ReadMaxBytes):
            raise UsageError(
                f"a stream of the format pulsar-offload does not support the limit {limit!r}"
            )
        files = limit.max_files if isinstance(limit, ReadMaxFiles) else None
        size = (
            limit.max_bytes if isinstance(limit, ReadMaxBytes) else self._options.bytes_per_trigger
        )
        return admitted(new, files, size)

    # ---- what to read

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        before, after = decode_seen(start), decode_seen(end)
        wanted = {
            (topic, number)
            for topic, numbers in after.items()
            for number in numbers - before.get(topic, frozenset())
        }
        known = self._known(wanted)
        if len(known) < len(wanted):  # a batch that an earlier run of the query planned
            self._look()
            known = self._known(wanted)
        self._report({*wanted} - {(str(ledger.topic), ledger.ledger_id) for ledger in known})
        assert self._bucket is not None or not known, "a ledger is known from the bucket"
        if self._bucket is None:
            return []
        read = with_read(before, known)
        within = [each for each in self._there if each not in unread([each], read)]
        planned = splits(self._bucket, known, within, self._options.split_bytes)
        return [InputPartition(split) for split in planned]

    def _known(self, wanted: set[tuple[str, int]]) -> list[Ledger]:
        return [each for each in self._there if (str(each.topic), each.ledger_id) in wanted]

    def _report(self, gone: set[tuple[str, int]]) -> None:
        if not gone:
            return
        said = ", ".join(f"{number} of {topic}" for topic, number in sorted(gone)[:_SHOWN])
        more = f" and {len(gone) - _SHOWN} more" if len(gone) > _SHOWN else ""
        if self._options.fail_on_data_loss:
            raise MissingData(
                f"the ledgers {said}{more} were deleted before the stream read them: set "
                "failOnDataLoss=false to leave them out"
            )
        event(_log, logging.WARNING, "stream skips ledgers that are gone", ledgers=said + more)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        yield from read_split(self._options, partition.value)

    def commit(self, end: dict[str, Any]) -> None:
        """Does nothing: the position of a query is in Spark's checkpoint only."""

    def stop(self) -> None:
        store, self._store, self._bucket = self._store, None, None
        if store is not None:
            store.close()
