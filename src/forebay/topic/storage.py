"""`WalStorage`: one topic that this process owns: its log, its objects, and the work between them.

`Topic` is the public interface over it. `PersistentStorage` is the smaller interface that a message
dispatcher needs.

Beware: after a write error or after another process took the topic over, the storage accepts no
more appends. Get a new one with `WalStorageFactory.for_topic`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final, Literal, Protocol, TypeVar

from forebay.catalog.chain import Chain
from forebay.catalog.records import TopicRecord, offset_before, unread_between
from forebay.clock import SYSTEM_CLOCK
from forebay.config.topics import TopicSetting
from forebay.errors import (
    ForebayError,
    LogClosed,
    OffsetOutOfRange,
    TopicDeleted,
    TopicFenced,
    UsageError,
)
from forebay.format.cursor import Cursor
from forebay.format.descriptor import ObjectDescriptor
from forebay.format.message import StreamMessage
from forebay.format.names import parse_topic, subscription_cursor
from forebay.format.subscription import SubscriptionRow
from forebay.interrupts import run_aside
from forebay.limits import CLOSE_SECONDS_MAX
from forebay.logs import event
from forebay.read.by_time import TimeSearch
from forebay.settings import StoreSettings
from forebay.topic.accept import AcceptedLoss, accept_loss
from forebay.topic.configure import configure_topic, effective_settings, topic_settings
from forebay.topic.cursors import CHECKPOINT_CURSOR, TopicCursors
from forebay.topic.opening import TopicClaim
from forebay.topic.producers import ReadLog, TopicProducers
from forebay.topic.resources import StoreResources
from forebay.topic.subscriptions import Subscription, TopicSubscriptions
from forebay.topic.trimming import Trimmer
from forebay.upload.rolling import RollingUploader
from forebay.upload.uploader import Uploader
from forebay.wal.log import Durability, Wal
from forebay.wal.reader import AsyncLogReader, LogReader
from forebay.wal.retention import Deleter
from forebay.wal.segment import Segment
from forebay.wal.watermarks import Visibility, Watermarks

_Result = TypeVar("_Result")
_log: Final = logging.getLogger("forebay.topic")
_INDEXED_BATCHES: Final = 256
"""Batches of `Chain.index` in one run: a few seconds, so that other topics get their turn."""


@dataclass(frozen=True, slots=True)
class StartPosition:
    """Where a reader begins. Build it with `latest()` or `offset(n)`."""

    value: int | Literal["latest"]

    @classmethod
    def latest(cls) -> StartPosition:
        """The position after the last message appended so far."""
        return cls("latest")

    @classmethod
    def offset(cls, number: int) -> StartPosition:
        if number < 0:
            raise UsageError(f"offset {number} is negative")
        return cls(number)


class TopicStream(Protocol):
    """Yields messages in the order of their offsets, until `close`."""

    def __iter__(self) -> Iterator[StreamMessage]: ...

    def close(self) -> None: ...


class PersistentStorage(Protocol):
    """The interface of a message dispatcher to one topic, independent of how it is stored.

    It follows Danube's interface, but without a topic's name: a storage belongs to one topic.
    """

    def append_message(self, message: StreamMessage) -> int:
        """Appends the message and returns its offset."""

    def create_reader(self, start: StartPosition) -> TopicStream:
        """Reads messages from `start` on, and waits for new ones at the end."""

    def ack_checkpoint(self, up_to_offset: int) -> None:
        """Records that consumers are done with all messages up to and including the offset."""

    def flush(self) -> None:
        """Waits until everything appended so far is synced."""


class WalStorage(PersistentStorage):
    """One topic: its log, its objects, and the work that moves messages between them. Thread-safe.

    A topic of a store in memory has only a log.
    """

    def __init__(
        self,
        wal: Wal,
        deleter: Deleter,
        resources: StoreResources | None = None,
        claim: TopicClaim | None = None,
    ) -> None:
        self.wal = wal
        self._deleter = deleter
        self._claim = claim
        self._resources = resources
        self.settings: StoreSettings | None = None if resources is None else resources.settings
        """The settings in effect: those of the store, with the topic's own in place of some."""
        self.uploader: Uploader | None = None
        self._trimmer: Trimmer | None = None
        self._chain: Chain | None = None
        """The rows of the chain, until it is known that none is missing."""
        self.start_unsure = False
        """Whether the catalog may have a later start: remote retention runs, or has failed."""
        self._tiered_log = None
        if resources is not None and claim is not None:
            topic = parse_topic(wal.topic)
            epoch = claim.ownership.epoch
            self.uploader = RollingUploader(
                topic, wal, epoch, resources.catalog, resources.upload_ports
            )
            assert claim.record is not None
            self.uploader.follow(claim.record)
            self.uploader.look = self._look
            self._tiered_log = resources.tiered_log(topic, wal)
            self._trimmer = Trimmer(topic, wal, deleter, resources)
            self._chain = resources.catalog.chain(topic)
        self.cursors, self._subscriptions = self._made_cursors(resources)
        self.producers = self._made_producers(resources)

    def _made_cursors(
        self, resources: StoreResources | None
    ) -> tuple[TopicCursors, TopicSubscriptions]:
        topic, claim = parse_topic(self.wal.topic), self._claim
        catalog, epoch, delta, now_ms = None, 0, 1, SYSTEM_CLOCK.now_ms
        if resources is not None and claim is not None:
            delta = resources.settings.metadata.progress_min_offset_delta
            catalog, epoch = resources.catalog, claim.ownership.epoch
            now_ms = resources.clock.now_ms
        cursors = TopicCursors(topic, catalog, epoch, delta, now_ms)
        return cursors, TopicSubscriptions(topic, catalog, epoch, cursors, now_ms)

    def _made_producers(self, resources: StoreResources | None) -> TopicProducers:
        def reader(start: int, end: int) -> LogReader:
            position = StartPosition.offset(start)
            return self.create_reader(position, end=end, visibility="buffered")

        log = ReadLog(lambda: self.start_offset, reader)
        if resources is None or self._claim is None:
            return TopicProducers(self.wal, log, None, 0)
        return TopicProducers(self.wal, log, resources.catalog, self._claim.ownership.epoch)

    @property
    def name(self) -> str:
        return self.wal.topic

    @property
    def start_offset(self) -> int:
        """The oldest offset that can be read."""
        if self.uploader is not None and self.start_unsure:
            with suppress(ForebayError):  # the catalog is away: the start may be an earlier one
                run_aside(self.uploader.record)
        return self.start_known

    @property
    def start_known(self) -> int:
        """`start_offset` as far as it is known here: never asks the catalog."""
        return self.wal.start_offset if self.uploader is None else self.uploader.start_offset

    # -- settings -------------------------------------------------------------------------------

    @property
    def uploads_itself(self) -> bool:
        """Whether this process uploads the topic in the background, and not the Spark pipeline."""
        return self.settings is not None and self.settings.uploader.by_owner

    def configure(
        self, values: Mapping[str, object], unset: Iterable[str] = ()
    ) -> list[TopicSetting]:
        """Changes the topic's own settings; see `forebay.topic.configure`. In effect at once."""
        uploader, resources = self._require_uploader(), self._require_resources()

        def change() -> list[TopicSetting]:
            found = configure_topic(
                uploader.catalog, uploader.topic, resources.settings, values, unset
            )
            self._read_settings()
            return found

        return run_aside(change)

    def topic_settings(self) -> list[TopicSetting]:
        """Reads the topic's settings, with where their values come from."""
        uploader, resources = self._require_uploader(), self._require_resources()
        return run_aside(
            lambda: topic_settings(uploader.catalog, uploader.topic, resources.settings)
        )

    def refresh_settings(self) -> None:
        """Reads the topic's own settings, and uses them from now on."""
        if self.uploader is not None:
            run_aside(self._read_settings)

    def _read_settings(self) -> None:
        uploader, resources = self._require_uploader(), self._require_resources()
        found = effective_settings(uploader.catalog, uploader.topic, resources.settings)
        uploader.configure(found.uploader)
        if found == self.settings:
            return
        assert self._trimmer is not None
        self._trimmer.configure(found)
        self.wal.configure_rotation(found.wal.rotate_max_bytes, found.wal.rotate_max_seconds)
        self.settings = found
        event(_log, logging.INFO, "settings changed", topic=self.name)

    def _look(self) -> None:
        """Runs before each cycle of uploads."""
        assert self._claim is not None
        self._claim.finish_looking()
        self._read_settings()

    def _require_resources(self) -> StoreResources:
        assert self._resources is not None, "a topic with an uploader has them"
        return self._resources

    # -- appending ------------------------------------------------------------------------------

    def append_message(self, message: StreamMessage, durability: Durability = "buffered") -> int:
        """Appends the message with a new offset, and returns that offset."""
        return self.wal.append_message(message, durability)

    def flush(self) -> None:
        self.wal.flush()

    def watermarks(self) -> Watermarks:
        marks = self.wal.watermarks()
        if self.uploader is None:
            return marks
        return replace(marks, uploaded=self.uploader.uploaded, verified=self.uploader.verified)

    # -- reading --------------------------------------------------------------------------------

    def create_reader(
        self,
        start: StartPosition,
        *,
        end: int | None = None,
        visibility: Visibility = "synced",
    ) -> LogReader:
        """Returns a reader over objects, segments and memory.

        Without an `end` it waits for new messages. Raises OffsetOutOfRange if `start` is not in the
        topic.
        """
        self.require_start(start, self.start_offset)
        return self.wal.tail_reader(
            start.value, end=end, visibility=visibility, through=self._tiered_log
        )

    def reader_at_time(
        self, time_ms: int, *, end: int | None = None, visibility: Visibility = "synced"
    ) -> LogReader:
        """Returns a reader at the first message that was published at `time_ms` or later.

        If no message is, the reader is at the end of the log, or at `end` if that comes before.
        """
        newest = self.wal.current_offset()
        stop = newest if end is None else min(end, newest)

        def open_reader(start: int, known: ObjectDescriptor | None) -> LogReader:
            through, resources = self._tiered_log, self._resources
            if resources is not None and known is not None:
                through = resources.tiered_log(parse_topic(self.name), self.wal, known)
            return self.wal.tail_reader(start, end=end, visibility=visibility, through=through)

        uploader, wal = self.uploader, self.wal
        catalog = None if uploader is None else uploader.catalog
        tail = 0 if uploader is None else uploader.uploaded
        search = TimeSearch(parse_topic(self.name), catalog, tail, wal, wal.indexes)
        return search.reader(time_ms, min(self.start_known, stop), stop, open_reader)

    def offset_of_last(self, count: int, end: int) -> int:
        """Returns the offset of the first of the last `count` messages before `end`.

        Returns the oldest offset if there are fewer. May ask the catalog, for offsets without
        messages.
        """
        uploader = self.uploader
        record = None if uploader is None else run_aside(uploader.record)
        return max(offset_before(record or TopicRecord(), end, count), self.start_known)

    def stream_at_time(
        self,
        time_ms: int,
        *,
        end: int | None = None,
        visibility: Visibility = "synced",
        threads: Executor | None = None,
    ) -> AsyncLogReader:
        """`reader_at_time` for asyncio. The search runs on `threads`, before the first message."""

        def locate() -> int:
            with self.reader_at_time(time_ms, end=end, visibility=visibility) as reader:
                return reader.position

        return self.wal.async_reader(
            "latest",
            end=end,
            visibility=visibility,
            through=self._tiered_log,
            threads=threads,
            locate=locate,
        )

    def create_stream(
        self,
        start: StartPosition,
        *,
        end: int | None = None,
        visibility: Visibility = "synced",
        threads: Executor | None = None,
    ) -> AsyncLogReader:
        """`create_reader` for asyncio. It does not ask the catalog, which may take long.

        Messages that remote retention is just deleting raise OffsetOutOfRange when they are read.
        """
        self.require_start(start, self.start_known)
        return self.wal.async_reader(
            start.value, end=end, visibility=visibility, through=self._tiered_log, threads=threads
        )

    def require_start(self, start: StartPosition, oldest: int) -> None:
        """Raises OffsetOutOfRange if `start` is before the offset `oldest`."""
        if start.value != "latest" and start.value < oldest:
            raise OffsetOutOfRange(
                f"{self.name}: offset {start.value} is not in the topic: the oldest is {oldest}",
                start=oldest,
                end=self.wal.current_offset(),
            )

    def ack_checkpoint(self, up_to_offset: int) -> None:
        """Waits until the offset is synced, then records that consumers are done up to it.

        It survives a restart: the catalog gets it soon, and when the topic is closed (see
        `forebay.topic.cursors`).
        """
        self.wal.wait(up_to_offset)
        self.cursors.acknowledge(CHECKPOINT_CURSOR, 0, up_to_offset + 1)

    @property
    def acknowledged(self) -> int:
        """One more than the highest offset that was passed to `ack_checkpoint`, ever.

        May ask the catalog, once.
        """
        return run_aside(lambda: self.cursors.cursor(CHECKPOINT_CURSOR)).position

    def flush_cursors(self) -> None:
        """Writes what consumers acknowledged to the catalog, if it is enough."""
        self._fencing(self.cursors.flush)

    def flush_producers(self) -> None:
        """Writes the numbers of idempotent producers to the catalog, if it is due."""
        self._fencing(self.producers.flush)

    # -- subscriptions --------------------------------------------------------------------------

    def subscriptions(self) -> list[SubscriptionRow]:
        """Reads the rows of all subscriptions."""
        return run_aside(self._subscriptions.rows)

    def subscription_cursor(self, name: str) -> Cursor:
        """Returns what a subscription has acknowledged. May ask the catalog, once for all of them.

        Raises UnknownSubscription if there is no such subscription.
        """
        return run_aside(lambda: self._subscriptions.cursor(name))

    def create_subscription(
        self, row: SubscriptionRow, start_cursor: Cursor
    ) -> tuple[SubscriptionRow, Cursor]:
        """Creates the subscription with its cursor, or returns what is there if it exists.

        Waits until every offset of the cursor is synced: after a crash, other messages would get
        those that were not. Raises UsageError if the row cannot be stored, TooManySubscriptions,
        and OffsetOutOfRange if the cursor goes beyond the log.
        """
        self._require_synced(start_cursor)
        return self._fencing(lambda: self._subscriptions.create(row, start_cursor))

    def update_subscription(self, row: SubscriptionRow) -> SubscriptionRow:
        """Replaces the row of a subscription, and returns it as it is stored.

        Raises UnknownSubscription if there is none, and UsageError if the row cannot be stored.
        """
        return self._fencing(lambda: self._subscriptions.update(row))

    def delete_subscription(self, name: str) -> bool:
        """Removes the subscription with its cursor, and returns whether it was there."""
        return self._fencing(lambda: self._subscriptions.delete(name))

    def put_cursor(self, name: str, cursor: Cursor) -> None:
        """Replaces a subscription's cursor by one that has everything acknowledged so far.

        The catalog gets it soon, and when the topic is closed. It waits until every offset of the
        cursor is synced, which those of readers are. No effect on a subscription that was deleted.
        """
        self._require_synced(cursor)
        self.cursors.put(subscription_cursor(name), cursor)

    def reset_cursor(self, name: str, cursor: Cursor) -> None:
        """Moves a subscription's cursor, back too, and writes that to the catalog now.

        Raises UnknownSubscription if there is no such subscription, and OffsetOutOfRange if the
        cursor goes beyond the log. After ServiceError it may have moved in the catalog; the next
        flush writes the former one again.
        """
        self._require_synced(cursor)
        self._fencing(lambda: self._subscriptions.reset(name, cursor))

    def _require_synced(self, cursor: Cursor) -> None:
        end = cursor.ranges[-1][1] if cursor.ranges else cursor.position
        if end:
            self.wal.wait(end - 1)

    def described_subscriptions(self) -> list[Subscription]:
        """Returns the subscriptions with what they have acknowledged. Asks the catalog."""
        return run_aside(self._describe_subscriptions)

    def _describe_subscriptions(self) -> list[Subscription]:
        rows, cursors = self._subscriptions.rows(), self.cursors.all()
        record = TopicRecord() if self.uploader is None else self.uploader.record()
        start, end = self.start_known, self.wal.watermarks().synced
        found = ((row, cursors.get(subscription_cursor(row.name), Cursor())) for row in rows)
        return [
            Subscription(
                row.name,
                row.kind_name,
                cursor,
                unread_between(record, cursor, start, end),
                row.consumers,
                row.created_ms,
            )
            for row, cursor in found
        ]

    # -- objects --------------------------------------------------------------------------------

    def upload(self) -> list[ObjectDescriptor]:
        """Uploads everything appended so far, and returns the new objects."""
        uploader = self._require_uploader()
        self.wal.flush()
        sealed = self.seal_for_ledgers()
        done = self._fencing(lambda: uploader.run_once(force=True))
        if not sealed and self.seal_for_ledgers():  # the format was changed by another process
            done += self._fencing(lambda: uploader.run_once(force=True))
        return done

    def offload(self, until: int) -> list[ObjectDescriptor]:
        """Uploads the sealed segments before `until` as ledgers: see `Uploader.offload`."""
        uploader = self._require_uploader()
        return self._fencing(lambda: uploader.offload(until))

    def seal_for_ledgers(self) -> bool:
        """Begins a new segment if the topic is uploaded as ledgers, which hold sealed segments.

        Returns whether it did. By the settings as they were read last.
        """
        uploader = self._require_uploader()
        if self.settings is None or not self.settings.uploader.ledgers:
            return False
        active = next((each for each in self.wal.segments() if not each.sealed), None)
        if active is None or active.end_offset <= uploader.uploaded:
            return False
        self.wal.rotate()
        return True

    def upload_due(self) -> bool:
        """Runs one upload cycle of the background work; returns whether it left something due."""
        uploader = self._require_uploader()
        self._fencing(uploader.run_once)
        return uploader.unfinished

    def accept_loss(self, start: int | None = None, end: int | None = None) -> AcceptedLoss:
        """Accepts lost and unknown offsets; see `forebay.topic.accept`."""
        uploader = self._require_uploader()
        return run_aside(lambda: accept_loss(uploader.catalog, uploader.topic, start, end))

    def follow_uploads(self) -> None:
        """Updates the watermarks to what another process, such as the pipeline, has uploaded."""
        uploader = self._require_uploader()
        self._fencing(uploader.record)
        uploader.look()

    def wait_uploaded(self, target: int, timeout: float | None = None) -> None:
        """Uploads until everything before `target` is in committed objects.

        Raises WaitTimeout if it is not synced after `timeout` seconds, and what an upload raises.
        """
        uploader = self._require_uploader()
        self.wal.await_synced(target, timeout)
        while uploader.uploaded < target:
            try:
                self.seal_for_ledgers()
                self._fencing(lambda: uploader.run_once(force=True))
            except ForebayError:
                # An error after the commit, such as a failed check of a restored object, is not
                # the caller's: a caller that gets an error appends the message a second time.
                if uploader.uploaded < target:
                    raise

    def _require_uploader(self) -> Uploader:
        if self.uploader is None:
            raise UsageError(
                f"{self.name}: a store in memory has no objects; open a store in a directory"
            )
        return self.uploader

    def _fencing(self, action: Callable[[], _Result]) -> _Result:
        """Runs `action` aside. If it raises TopicFenced, the log accepts no more appends.

        An interrupt ends the wait for it; the action itself goes on to its end.
        """
        self.wal.require_outside()
        return run_aside(lambda: self._fenced_by(action))

    def _fenced_by(self, action: Callable[[], _Result]) -> _Result:
        try:
            return action()
        except TopicFenced as error:
            self.fence(error)
            raise
        except LogClosed:
            if self.wal.deletion is not None:
                raise TopicDeleted(str(self.wal.deletion)) from None
            raise

    def fence(self, error: TopicFenced) -> None:
        self.wal.fence(error)

    def trim_due(self) -> None:
        """One cycle of retention, of both tiers."""
        try:
            self.trim_remote()
        finally:  # a store that deletes nothing must not fill the local disk
            self.trim_local()

    def index_chain(self) -> None:
        """Adds the rows that a catalog of an earlier release lacks, a bounded number at a time."""
        for _ in range(_INDEXED_BATCHES):
            if self._chain is None or self.wal.ended:
                return
            if self._chain.index(1):
                self._chain = None

    def trim_local(self) -> list[Segment]:
        """Runs one retention pass and returns the deleted segments.

        Only messages that are also in verified objects are deleted.
        """
        if self._trimmer is None or self._claim is None:
            return self.wal.retain(self._deleter, self.wal.watermarks().verified)
        trimmer, claim = self._trimmer, self._claim

        def trim() -> list[Segment]:
            self._read_settings()
            return trimmer.trim_local(claim.ownership.epoch)

        return self._fencing(trim)

    def trim_remote(self) -> list[ObjectDescriptor]:
        """Runs one pass of remote retention and returns the deleted objects."""
        if self._trimmer is None or self._claim is None:
            return []
        trimmer, claim = self._trimmer, self._claim

        def trim() -> list[ObjectDescriptor]:
            self._read_settings()
            return trimmer.trim_remote(claim.ownership.epoch)

        before, self.start_unsure = self.start_unsure, True
        gone = self._fencing(trim)
        if gone:  # the time rows may have to be made anew
            self._chain = self._require_uploader().catalog.chain(self._require_uploader().topic)
        if gone or before:
            run_aside(self._require_uploader().record)
        self.start_unsure = False
        return gone

    @property
    def epoch(self) -> int | None:
        """The epoch with which this process took the topic; None for a store in memory."""
        return None if self._claim is None else self._claim.ownership.epoch

    def end_for_deletion(self, error: TopicDeleted) -> None:
        """Lets nothing more be appended, read or uploaded: everybody gets `error`.

        An upload that runs now ends at its next step.
        """
        if self.uploader is not None:
            self.uploader.stop()
        if self._claim is not None:
            self._claim.ownership.refuse(error)
        self.wal.fence(error)

    def abandon(self) -> None:
        """Releases a topic whose log stopped, so that it can be opened again."""
        if self.uploader is not None:
            self.uploader.close()
        self.wal.abandon()

    def close(self, seconds: float = CLOSE_SECONDS_MAX) -> None:
        """Ends the background work, syncs the log, and releases the topic.

        Waits at most `seconds` for a request to the object store.
        """
        if self.uploader is not None:
            self.uploader.close(seconds)
        try:
            self._flush_last()
            self.wal.shutdown()
        finally:
            # After an interrupted shutdown there are frames left to write, which needs the claim.
            if self._claim is not None and self.wal.released and not self.wal.stopped:
                self._claim.release(self.wal.current_offset())

    def _flush_last(self) -> None:
        """Writes what consumers acknowledged, before the topic is given up."""
        if self.wal.ended:
            return
        try:
            self.cursors.flush(everything=True)
        except ForebayError as error:  # consumers get these messages again
            event(
                _log,
                logging.WARNING,
                "acknowledged offsets were not written",
                topic=self.name,
                error=error,
            )
        try:
            self.producers.flush(everything=True)
        except ForebayError as error:  # the next owner reads them from the log
            event(
                _log,
                logging.WARNING,
                "the numbers of idempotent producers were not written",
                topic=self.name,
                error=error,
            )
