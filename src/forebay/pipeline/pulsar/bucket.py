"""Finds the ledgers in a bucket: every index object, anywhere below the prefix.

An index object names its topic, and says where the blocks of its data object are. It is written
last, so a data object without one is an upload that failed, or has not ended yet, and is left out.
Two complete uploads of one ledger have the same entries, maybe in blocks of another size: the first
by its name is taken.

A `Bucket` remembers what it read, so that a stream reads an index only once.

Beware: a bucket may hold ledgers of several clusters, which count their ledgers each for itself. If
two of them have the same topic and the same number, but other entries, that is an error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from forebay.errors import CorruptLog, LedgerError, ObjectMissing, UsageError
from forebay.format.names import LedgerName, parse_ledger
from forebay.format.pulsar.index import LedgerIndex, decode_index
from forebay.format.pulsar.topic import PulsarTopic, topic_of_managed_ledger
from forebay.limits import LEDGER_INDEX_BYTES_MAX
from forebay.logs import event
from forebay.objects.backend import ObjectMeta
from forebay.objects.store import CloudStore
from forebay.read.fetch_pool import FetchFuture, FetchPool

_log: Final = logging.getLogger("forebay.pipeline")

INDEX_READERS: Final = 16
"""Indexes that are read at the same time: each takes two small requests."""
_VERSION: Final = "s3managedledgeroffloaderformatversion"
_TOPIC: Final = "managedledgername"
_OWN: Final = "forebay/"
"""How the names of custom metadata begin in ledgers that Forebay wrote."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """One offloaded ledger. Can be pickled."""

    topic: PulsarTopic
    ledger_id: int
    key: str
    """Of the data object."""
    size: int
    """Of the data object, in bytes."""
    entries: int
    entry_bytes: int
    """Of all entries, without their headers: it does not depend on the size of blocks."""
    created_ms: int | None
    """When the ledger was created; no message was published before, as far as clocks are right.
    None for ledgers whose messages may be older."""
    modified_ms: int
    """When the index was written."""

    @property
    def id(self) -> tuple[PulsarTopic, int]:
        """What a ledger is known by. Sorted by it, the messages of a topic are in order."""
        return self.topic, self.ledger_id


class Bucket:
    """The ledgers in one bucket, as of the last `look`. Not thread-safe."""

    def __init__(self, store: CloudStore, *, fail_on_data_loss: bool = True) -> None:
        self._store = store
        self._fail = fail_on_data_loss
        self._indexes: dict[str, tuple[ObjectMeta, LedgerIndex | LedgerError, PulsarTopic]] = {}
        self._reported: set[str] = set()

    def look(self) -> list[Ledger]:
        """Lists the bucket; returns the complete ledgers, sorted by topic and number.

        CorruptLog if a ledger has no upload that can be read.
        """
        data: dict[str, ObjectMeta] = {}
        indexes: dict[str, tuple[ObjectMeta, LedgerName]] = {}
        for meta in self._store.list(""):
            folder, slash, name = meta.key.rpartition("/")
            found = parse_ledger(name)
            if found is None:
                continue
            if found.is_index:
                indexes[f"{folder}{slash}{found.data_name}"] = meta, found
            else:
                data[meta.key] = meta
        for key in indexes.keys() - data.keys():
            self._look_again(key, data, indexes)
        self._read(meta for meta, _ in indexes.values())
        return self._chosen(data, indexes)

    def _look_again(
        self,
        key: str,
        data: dict[str, ObjectMeta],
        indexes: dict[str, tuple[ObjectMeta, LedgerName]],
    ) -> None:
        """Looks for a data object that was not listed: objects come and go during a listing."""
        try:
            data[key] = self._store.head(key)
        except ObjectMissing:
            try:
                self._store.head(indexes[key][0].key)
            except ObjectMissing:
                del indexes[key]

    def index(self, ledger: Ledger) -> LedgerIndex:
        """The index of a ledger that `look` returned."""
        found = self._indexes[f"{ledger.key}-index"][1]
        assert isinstance(found, LedgerIndex), "the ledger was chosen"
        return found

    def _read(self, metas: Iterable[ObjectMeta]) -> None:
        """Reads the indexes that are new or have changed, and forgets those that are gone."""
        there = {meta.key: meta for meta in metas}
        self._indexes = {key: known for key, known in self._indexes.items() if key in there}
        new = [
            meta
            for key, meta in there.items()
            if key not in self._indexes or self._indexes[key][0].etag != meta.etag
        ]
        for meta, found in zip(new, side_by_side(self._read_one, new), strict=True):
            if found is None:
                self._indexes.pop(meta.key, None)
            else:
                self._indexes[meta.key] = (meta, *found)

    def _read_one(self, meta: ObjectMeta) -> tuple[LedgerIndex | LedgerError, PulsarTopic] | None:
        """Reads one index; None if it was deleted meanwhile."""
        nowhere = topic_of_managed_ledger(None)
        if meta.size > LEDGER_INDEX_BYTES_MAX:
            return LedgerError(f"the index has {meta.size} bytes"), nowhere
        try:
            head = self._store.head(meta.key)
            raw = self._store.get_range(meta.key, 0, head.size)
        except ObjectMissing:
            return None
        said = {name.lower(): value for name, value in head.metadata.items()}  # GCS has capitals
        version = said.get(_VERSION)
        if version not in (None, "1"):
            return LedgerError(f"it has the format version {version}, not 1"), nowhere
        try:
            index = decode_index(raw)
            name = index.metadata.managed_ledger or said.get(_TOPIC)
        except LedgerError as error:
            return error, nowhere
        return index, topic_of_managed_ledger(name)

    def _chosen(
        self, data: dict[str, ObjectMeta], indexes: dict[str, tuple[ObjectMeta, LedgerName]]
    ) -> list[Ledger]:
        found: dict[tuple[PulsarTopic, int], Ledger] = {}
        faults: list[tuple[PulsarTopic, LedgerName, str, str]] = []
        for key, (meta, name) in sorted(indexes.items()):
            known = self._indexes.get(meta.key)
            if known is None:
                continue
            _, index, topic = known
            reason = _fault(index, data.get(key))
            if reason is not None or isinstance(index, LedgerError):
                said = f"{self._store.name}: {meta.key}: {reason}"
                faults.append((topic, name, key.rpartition("/")[0], said))
                continue
            ledger = _ledger(topic, name.ledger_id, key, index, meta)
            before = found.setdefault(ledger.id, ledger)
            if (before.entries, before.entry_bytes) != (ledger.entries, ledger.entry_bytes):
                raise UsageError(
                    f"{self._store.name}: {before.key} and {key} are two different ledgers "
                    f"{name.ledger_id} of {topic}: name a prefix that holds those of one cluster"
                )
        self._report(_unreadable(faults, found.values()))
        return sorted(found.values(), key=lambda ledger: ledger.id)

    def _report(self, faults: Iterable[str]) -> None:
        for said in faults:
            if self._fail:
                raise CorruptLog(
                    f"{said}; offload the ledger again, delete the object, or set "
                    "failOnDataLoss=false to leave the ledger out"
                )
            if said not in self._reported:
                self._reported.add(said)
                event(_log, logging.WARNING, "ledger left out", reason=said)


def _unreadable(
    faults: Iterable[tuple[PulsarTopic, LedgerName, str, str]], readable: Iterable[Ledger]
) -> list[str]:
    """What is wrong with the uploads of ledgers of which no other upload can be read.

    An upload whose index does not say its topic may be of any ledger with its number in its folder.
    """
    there: set[tuple[object, int]] = set()
    for ledger in readable:
        there |= {ledger.id, (ledger.key.rpartition("/")[0], ledger.ledger_id)}
    return [
        said
        for topic, name, folder, said in faults
        if ((topic if topic.namespace else folder), name.ledger_id) not in there
    ]


def _fault(index: LedgerIndex | LedgerError, data: ObjectMeta | None) -> str | None:
    """Why the ledger cannot be read; None if it can."""
    if isinstance(index, LedgerError):
        return str(index)
    if data is None:
        return "there is no data object for it"
    if data.size != index.data_bytes:
        return f"its data object has {data.size} bytes, not {index.data_bytes}"
    return None


def _ledger(
    topic: PulsarTopic, ledger_id: int, key: str, index: LedgerIndex, meta: ObjectMeta
) -> Ledger:
    own = any(name.startswith(_OWN) for name, _ in index.metadata.custom)
    created = None if own else index.metadata.created_ms or None
    entries = index.last_entry_id + 1
    length = index.metadata.length
    return Ledger(
        topic, ledger_id, key, index.data_bytes, entries, length, created, meta.modified_ms
    )


def side_by_side(
    work: Callable[[ObjectMeta], tuple[LedgerIndex | LedgerError, PulsarTopic] | None],
    items: Sequence[ObjectMeta],
) -> list[tuple[LedgerIndex | LedgerError, PulsarTopic] | None]:
    """The results of `work`, some of which run at the same time."""
    if len(items) < INDEX_READERS:
        return [work(item) for item in items]
    pool = FetchPool(INDEX_READERS)
    try:
        futures: list[FetchFuture[tuple[LedgerIndex | LedgerError, PulsarTopic] | None]] = [
            pool.submit(partial(work, item)) for item in items
        ]
        return [future.result() for future in futures]
    finally:
        pool.close()


def within(
    ledgers: Sequence[Ledger], start: int | None, end: int | None, slack_ms: int, late_ms: int
) -> list[Ledger]:
    """The ledgers, sorted as by `look`, that may have messages published in `start..end`.

    A ledger is created when its topic's one before is closed, so both times are known but for
    clocks that are wrong. `slack_ms` is how wrong they may be. A message keeps its time when it is
    stored late, as those are that another cluster sent: at most `late_ms` after it was published.
    """
    found = []
    for number, ledger in enumerate(ledgers):
        following = ledgers[number + 1] if number + 1 < len(ledgers) else None
        closed = ledger.modified_ms
        if following is not None and following.topic == ledger.topic and following.created_ms:
            closed = min(closed, following.created_ms)
        if ledger.created_ms is not None:
            if start is not None and closed + slack_ms < start:
                continue
            if end is not None and ledger.created_ms - late_ms >= end:
                continue
        found.append(ledger)
    return found
