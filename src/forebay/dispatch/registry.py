"""`Registry`: the subscriptions of all topics of a store, and the consumers that may connect.

A subscription is created by the first consumer that subscribes: its row and its cursor are in the
catalog before the call returns. Numbers of consumers are computed from the names of topic,
subscription and consumer, and the rows say which there are. So a consumer that comes back after the
server was started again, and names only its number, is known.

A topic is opened, and its subscriptions begin to read, when the first consumer connects. Topics
without consumers cost nothing but their rows.

Beware: everything here belongs to one event loop. What asks the catalog or a disk runs on threads.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, Literal, Protocol, TypeAlias

from forebay.catalog.nonreliable import nonreliable_topics, require_not_nonreliable
from forebay.catalog.records import TopicRecord, unread_ranges
from forebay.catalog.subscriptions import note_listener, read_all
from forebay.dispatch import metrics
from forebay.dispatch.fanout import FanoutTopic
from forebay.dispatch.feed import ChunkCache, Delivery, Feed
from forebay.dispatch.key_filter import check_key_filters
from forebay.dispatch.policy import Policy, SubscriptionType
from forebay.dispatch.subscription import Consumer, Encode, Outboxes, Subscription
from forebay.dispatch.window import Window
from forebay.errors import (
    ForebayError,
    ServiceUnavailable,
    SubscriptionBusy,
    TooManySubscriptions,
    UnknownSubscription,
    UnknownTopic,
)
from forebay.format.cursor import Cursor
from forebay.format.message import MessageId, StreamMessage
from forebay.format.names import TopicName, parse_topic
from forebay.format.subscription import ConsumerRow, SubscriptionRow
from forebay.limits import OFFSET_MAX, SUBSCRIPTION_CONSUMERS_MAX, SUBSCRIPTIONS_MAX
from forebay.logs import event
from forebay.settings import BrokerSettings
from forebay.topic.lag import Lags
from forebay.topic.storage import WalStorage
from forebay.topic.store import Start, Store, Topic
from forebay.wal.watermarks import Visibility

_log: Final = logging.getLogger("forebay.dispatch")
_EXPECTED_SECONDS: Final = 10.0
"""How long a consumer that subscribed, and has not opened its stream, keeps its place."""
_SEEN_MS: Final = 3_600_000
"""How old the time at which a consumer was seen may be in the catalog."""
_LOAD_SECONDS: Final = 1.0
_DEAD_LETTERS: Final = "-dead-letters"


Skipped: TypeAlias = int | Literal["all", "blocked"]
"""A number of messages, or which ones."""


def _to_skip(
    storage: WalStorage, cursor: Cursor, blocked: Sequence[int], what: Skipped
) -> tuple[list[tuple[int, int]], int]:
    """Returns the offsets to skip, and how many messages they have. Asks the catalog for holes."""
    if what == "blocked":
        return [(offset, offset + 1) for offset in blocked], len(blocked)
    record = TopicRecord() if storage.uploader is None else storage.uploader.record()
    synced = storage.wal.watermarks().synced
    left = OFFSET_MAX if what == "all" else what
    skipped, reached = 0, cursor.position
    for start, end in unread_ranges(record, cursor, storage.start_known, synced):
        if skipped < left:
            reached = min(end, start + left - skipped)
            skipped += reached - start
    # One range: offsets without messages, and those acknowledged before, are in it.
    return ([(cursor.position, reached)] if skipped else []), skipped


def _save(state: _TopicState, name: str, cursor: Cursor) -> bool:
    """Hands a cursor over, without what is not synced yet; returns whether that was all of it."""
    synced = cursor.before(state.storage.wal.synced_offset)
    state.storage.put_cursor(name, synced)
    return synced is cursor


def stable_number(*names: str) -> int:
    """A number from 1 to 2^63 - 1 that is the same for the same names, in every run."""
    hashed = hashlib.blake2b(digest_size=8)
    for name in names:
        raw = name.encode("utf-8", "surrogatepass")
        hashed.update(len(raw).to_bytes(8, "little") + raw)
    return (int.from_bytes(hashed.digest(), "little") & (2**63 - 1)) or 1


def _require_room(topic: TopicName, name: str, others: Sequence[str]) -> None:
    if len(others) >= SUBSCRIPTION_CONSUMERS_MAX:
        raise SubscriptionBusy(
            f"{topic}: the subscription {name!r} has {len(others)} consumers, the most that it can "
            "have; close some, or use another subscription"
        )


@dataclass(slots=True)
class _Active:
    """A subscription that was loaded, with its row."""

    row: SubscriptionRow
    subscription: Subscription
    expected: dict[int, tuple[float, ConsumerRow]] = field(default_factory=dict)
    """Consumers that subscribed and have not connected yet, and until when they are expected."""
    placed: set[int] = field(default_factory=set)
    """The numbers that the registry knows of it: more than the row has, and not many more."""

    @property
    def kind(self) -> SubscriptionType:
        return SubscriptionType(self.row.kind)

    def others(self, number: int) -> list[str]:
        """The names of the other consumers that are connected, or about to."""
        now = time.monotonic()
        self.expected = {at: each for at, each in self.expected.items() if each[0] > now}
        names = {each.number: each.name for each in self.subscription.consumers}
        names |= {at: row.name for at, (_, row) in self.expected.items()}
        return [name for at, name in names.items() if at != number]

    def consumer(self, number: int) -> ConsumerRow | None:
        """A consumer that has subscribed. The row may have left it out since then."""
        if number in self.expected:
            return self.expected[number][1]
        return next((each for each in self.row.consumers if each.id == number), None)

    def unplaced(self) -> set[int]:
        """Forgets the numbers of consumers that are gone, if there are many; returns them."""
        if len(self.placed) <= 2 * SUBSCRIPTION_CONSUMERS_MAX:
            return set()
        here = {each.number for each in self.subscription.consumers} | self.expected.keys()
        gone = self.placed - here - {each.id for each in self.row.consumers}
        self.placed -= gone
        return gone


class LoadedTopic(Protocol):
    """A topic whose subscriptions are loaded, for those who look at them."""

    storage: WalStorage

    def rows(self) -> list[tuple[SubscriptionRow, Subscription]]: ...


@dataclass(slots=True)
class _TopicState:
    storage: WalStorage
    feed: Feed
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    active: dict[str, _Active] = field(default_factory=dict)

    def rows(self) -> list[tuple[SubscriptionRow, Subscription]]:
        return [(each.row, each.subscription) for each in self.active.values()]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a consumer belongs."""

    topic: TopicName
    name: str
    fanout: SubscriptionRow | None = None
    """The row, if the topic is non-reliable."""


class Leavable(Protocol):
    """What a consumer is connected to."""

    def leave(self, consumer: Consumer) -> None: ...


class Registry:
    """Call every method in the event loop of the server."""

    def __init__(
        self, store: Store, settings: BrokerSettings, *, patience_seconds: float = 5.0
    ) -> None:
        """`patience_seconds`: how long calls wait for the first answer of the catalog."""
        self._store = store
        self._patience_seconds = patience_seconds
        self._settings = settings
        self._cache = ChunkCache()
        self._outboxes = Outboxes()
        self._topics: dict[TopicName, _TopicState] = {}
        self._opening: dict[TopicName, asyncio.Lock] = {}
        self.fanouts: dict[TopicName, FanoutTopic] = {}
        """The non-reliable topics that are in use."""
        self._places: dict[int, _Place] = {}
        """Where each known consumer belongs."""
        self._fanout_names: dict[TopicName, set[str]] = {}
        """The subscriptions of non-reliable topics."""
        self._loaded = asyncio.Event()
        self.lags = Lags(store.catalog)

    # -- known consumers ------------------------------------------------------------------------

    async def load(self) -> None:
        """Reads which consumers there are; tries again until the catalog responds."""
        while not self._loaded.is_set():
            try:
                found = await asyncio.to_thread(self._read_places)
            except Exception as error:  # noqa: BLE001  # reported, and tried again
                event(_log, logging.WARNING, "subscriptions cannot be read yet", error=error)
                await asyncio.sleep(_LOAD_SECONDS)
                continue
            self._places = {**found, **self._places}
            for place in found.values():
                if place.fanout is not None:
                    self._fanout_names.setdefault(place.topic, set()).add(place.name)
            self._loaded.set()

    async def _require_loaded(self) -> None:
        try:
            await asyncio.wait_for(self._loaded.wait(), self._patience_seconds)
        except TimeoutError:
            raise ServiceUnavailable(
                "the subscriptions cannot be read from the catalog yet: try again"
            ) from None

    def _read_places(self) -> dict[int, _Place]:
        def damaged(error: ForebayError) -> None:
            event(_log, logging.ERROR, "a subscription's row is damaged", error=error)

        catalog = self._store.catalog
        if catalog is None:
            return {}
        fanouts = {each.name for each in nonreliable_topics(catalog)}
        return {
            consumer.id: _Place(topic, row.name, row if topic in fanouts else None)
            for topic, row in read_all(catalog, damaged)
            for consumer in row.consumers
        }

    async def knows(self, number: int) -> bool:
        """Whether it is the number of a consumer that has subscribed, in this run or before.

        Raises ServiceUnavailable if the catalog has not said so yet.
        """
        await self._require_loaded()
        return number in self._places

    # -- topics ---------------------------------------------------------------------------------

    async def _state(self, topic: TopicName) -> _TopicState:
        """Opens the topic, and loads its subscriptions, on first use."""
        found = self._topics.get(topic)
        if found is not None:
            if found.storage.wal.ended:
                await self._reopen(topic)
            return found
        lock = self._opening.setdefault(topic, asyncio.Lock())
        try:
            async with lock:
                if topic in self._topics:
                    return self._topics[topic]
                state = await self._open(topic)
                return self._topics.setdefault(topic, state)
        finally:
            self._opening.pop(topic, None)  # clients name any number of topics

    async def _open(self, topic: TopicName) -> _TopicState:
        def load() -> tuple[WalStorage, list[tuple[SubscriptionRow, Cursor]]]:
            storage = self._existing(topic)
            rows = storage.subscriptions()
            return storage, [(row, storage.subscription_cursor(row.name)) for row in rows]

        storage, found = await asyncio.to_thread(load)
        reopen = partial(self._reopen, topic)
        visibility: Visibility = "buffered" if self._settings.ack == "buffered" else "synced"
        state = _TopicState(storage, Feed(Topic(storage), reopen, self._cache, visibility))
        for row, cursor in found:
            self._activate(state, row, cursor)
        return state

    async def _reopen(self, topic: TopicName) -> Topic:
        """Opens a topic again whose log has ended."""
        storage = await asyncio.to_thread(self._existing, topic)
        state = self._topics.get(topic)
        if state is not None:
            before, state.storage = state.storage.wal, storage
            for active in state.active.values():
                if before.ended:
                    active.subscription.go_back(before.synced_offset)
                active.subscription.save()  # the catalog may not have what the old one knew
        return Topic(storage)

    def _existing(self, topic: TopicName) -> WalStorage:
        """Opens a topic, and never creates one."""
        if not self._store.exists(str(topic)):
            if self._store.catalog is not None:
                require_not_nonreliable(self._store.catalog, topic)
            raise UnknownTopic(f"there is no topic {topic}: a producer creates it")
        return self._store.storage(str(topic))

    def _activate(self, state: _TopicState, row: SubscriptionRow, cursor: Cursor) -> _Active:
        window = Window(SubscriptionType(row.kind), self._policy(state), cursor)
        name = row.name
        subscription = Subscription(
            name,
            window,
            state.feed,
            partial(_save, state, name),
            partial(self._store_dead_letter, state),
            skip_lost=self._settings_of(state).on_lost == "skip",
            outboxes=self._outboxes,
        )
        active = state.active[name] = _Active(row, subscription)
        topic = parse_topic(state.storage.name)
        for consumer in row.consumers:
            self._places[consumer.id] = _Place(topic, name)
            active.placed.add(consumer.id)
        return active

    def _settings_of(self, state: _TopicState) -> BrokerSettings:
        """The settings in effect for the topic."""
        own = state.storage.settings
        return self._settings if own is None else own.broker

    def _policy(self, state: _TopicState) -> Policy:
        settings = self._settings_of(state)
        return Policy(
            max_unacked_messages=settings.max_unacked_messages,
            ack_timeout_ms=settings.ack_timeout_ms,
            redelivery_delay_ms=settings.redelivery_delay_ms,
            redelivery_delay_max_ms=settings.redelivery_delay_max_ms,
            max_redeliveries=settings.max_redeliveries,
            poison=settings.poison,
        )

    # -- subscribing ----------------------------------------------------------------------------

    async def subscribe(
        self,
        topic: TopicName,
        name: str,
        kind: SubscriptionType,
        consumer: str,
        filters: Sequence[str] = (),
    ) -> int:
        """Creates the subscription if it does not exist, and returns the consumer's number.

        The topic must exist. Raises SubscriptionBusy if another consumer has an exclusive
        subscription, if consumers are connected that use it as another type, or if there are as
        many as there may be.
        """
        check_key_filters(filters)
        state = await self._state(topic)
        number = stable_number(str(topic), name, consumer)
        async with state.lock:
            active = state.active.get(name)
            if active is None:
                active = await self._create(state, name, kind)
            others = active.others(number)
            if active.kind is not kind:
                active = await self._change_kind(state, active, kind, others)
            elif kind is SubscriptionType.EXCLUSIVE and others:
                raise SubscriptionBusy(
                    f"{topic}: the exclusive subscription {name!r} has the consumer "
                    f"{others[0]!r}; close that one, or subscribe with another type"
                )
            _require_room(topic, name, others)
            row = ConsumerRow(number, consumer, tuple(filters), int(time.time() * 1000))
            await self._note(state, active, row)
            active.expected[number] = time.monotonic() + _EXPECTED_SECONDS, row
            active.placed.add(number)
            for gone in active.unplaced():
                self._places.pop(gone, None)
        self._places[number] = _Place(topic, name)
        return number

    async def subscribe_fanout(
        self,
        topic: FanoutTopic,
        name: str,
        kind: SubscriptionType,
        consumer: str,
        filters: Sequence[str] = (),
    ) -> int:
        """`subscribe` for a non-reliable topic. Its row only says which consumers there are."""
        check_key_filters(filters)
        number = stable_number(topic.name, name, consumer)
        key = parse_topic(topic.name)
        self._require_fanout_room(key, name)
        subscription = topic.subscription(name, kind)
        others = [each.name for at, each in subscription.consumers.items() if at != number]
        if kind is SubscriptionType.EXCLUSIVE and others:
            raise SubscriptionBusy(
                f"{topic.name}: the exclusive subscription {name!r} has the consumer "
                f"{others[0]!r}; close that one, or subscribe with another type"
            )
        _require_room(key, name, others)
        now_ms = int(time.time() * 1000)
        row = SubscriptionRow(
            name, int(kind), now_ms, (ConsumerRow(number, consumer, tuple(filters), now_ms),)
        )
        catalog = self._store.catalog
        if catalog is not None:
            await asyncio.to_thread(note_listener, catalog, key, row)
        self._places[number] = _Place(key, name, row)
        for gone in subscription.noted(number):
            self._places.pop(gone, None)
        return number

    def _require_fanout_room(self, topic: TopicName, name: str) -> None:
        names = self._fanout_names.setdefault(topic, set())
        if name not in names and len(names) >= SUBSCRIPTIONS_MAX:
            raise TooManySubscriptions(
                f"{topic} has {len(names)} subscriptions, the most that a topic can have"
            )
        names.add(name)

    async def _create(
        self,
        state: _TopicState,
        name: str,
        kind: SubscriptionType,
        start: Start | None = None,
    ) -> _Active:
        row = SubscriptionRow(name, int(kind), int(time.time() * 1000))
        place: Start = self._settings_of(state).subscription_start if start is None else start

        def create() -> tuple[SubscriptionRow, Cursor]:
            position = Topic(state.storage).position_of(place)
            return state.storage.create_subscription(row, Cursor(position))

        return self._activate(state, *await asyncio.to_thread(create))

    async def _change_kind(
        self, state: _TopicState, active: _Active, kind: SubscriptionType, others: list[str]
    ) -> _Active:
        """Changes the type of a subscription that nobody uses."""
        if others:
            raise SubscriptionBusy(
                f"{state.storage.name}: the subscription {active.row.name!r} is "
                f"{active.kind.name.lower()}, and the consumer {others[0]!r} uses it: close that "
                "one, or subscribe with the same type"
            )
        row = replace(active.row, kind=int(kind))
        row = await asyncio.to_thread(state.storage.update_subscription, row)
        await active.subscription.close()
        return self._activate(state, row, active.subscription.window.cursor())

    async def _note(self, state: _TopicState, active: _Active, consumer: ConsumerRow) -> None:
        """Writes the consumer into the row, unless it is there and was seen not long ago."""
        known = next((each for each in active.row.consumers if each.id == consumer.id), None)
        if (
            known is not None
            and known.filters == consumer.filters
            and consumer.seen_ms - known.seen_ms < _SEEN_MS
        ):
            return
        others = tuple(each for each in active.row.consumers if each.id != consumer.id)
        row = replace(active.row, consumers=(*others, consumer))
        active.row = await asyncio.to_thread(state.storage.update_subscription, row)

    async def connect(self, number: int, encode: Encode) -> tuple[Leavable, Consumer]:
        """Connects a consumer that has subscribed. It must `leave` what is returned with it.

        Raises UnknownSubscription if there is no such consumer.
        """
        await self._require_loaded()
        place = self._places.get(number)
        if place is None:
            raise UnknownSubscription(f"there is no consumer {number}: subscribe first")
        topic, name = place.topic, place.name
        if place.fanout is not None:
            return self._connect_fanout(number, place.fanout, topic, encode)
        state = await self._state(topic)
        active = state.active.get(name)
        row = None if active is None else active.consumer(number)
        if active is None or row is None:
            self._places.pop(number, None)
            raise UnknownSubscription(f"{topic} has no subscription {name!r}: subscribe again")
        consumer = Consumer(number, row.name, row.filters, encode, self._outboxes)
        active.expected.pop(number, None)
        active.subscription.join(consumer, self._policy(state))
        return active.subscription, consumer

    def _connect_fanout(
        self, number: int, row: SubscriptionRow, topic: TopicName, encode: Encode
    ) -> tuple[Leavable, Consumer]:
        fanout = self.fanouts.setdefault(topic, FanoutTopic(str(topic)))
        subscription = fanout.subscription(row.name, SubscriptionType(row.kind))
        own = next(each for each in row.consumers if each.id == number)
        consumer = Consumer(number, own.name, own.filters, encode, self._outboxes)
        subscription.join(consumer)
        return subscription, consumer

    async def find(self, topic: TopicName, name: str) -> Subscription:
        """Returns the subscription; UnknownSubscription if there is none."""
        return (await self._find(topic, name))[1].subscription

    async def _find(self, topic: TopicName, name: str) -> tuple[_TopicState, _Active]:
        state = await self._state(topic)
        active = state.active.get(name)
        if active is None:
            raise UnknownSubscription(f"{topic} has no subscription {name[:300]!r}")
        return state, active

    # -- for operators --------------------------------------------------------------------------

    async def create(
        self, topic: TopicName, name: str, kind: SubscriptionType, start: Start | None = None
    ) -> tuple[int, bool]:
        """Creates a subscription; returns its position, and whether it did not exist.

        One that exists stays as it is; SubscriptionBusy if its type is another one. Without a
        start, it begins where the settings say.
        """
        state = await self._state(topic)
        async with state.lock:
            active = state.active.get(name)
            created = active is None
            if active is None:
                active = await self._create(state, name, kind, start)
            if active.kind is not kind:
                raise SubscriptionBusy(
                    f"{topic} has a subscription {name!r} that is {active.row.kind_name}: delete "
                    "it first, or create one with another name"
                )
        return active.subscription.window.position, created

    async def seek(self, topic: TopicName, name: str, start: Start) -> int:
        """Moves the subscription, back or on; returns the offset. The catalog has it first.

        Everything before the offset counts as acknowledged, and nothing after it. What consumers
        have is forgotten, and so is which messages failed. See `Topic.seek`.
        """
        state, active = await self._find(topic, name)
        async with state.lock:
            position = await asyncio.to_thread(Topic(state.storage).position_of, start)
            with active.subscription.frozen():
                cursor = Cursor(position)
                await asyncio.to_thread(state.storage.reset_cursor, name, cursor)
                active.subscription.seek(cursor)
        return position

    async def skip(self, topic: TopicName, name: str, what: Skipped) -> tuple[int, int]:
        """Acknowledges messages that nobody has processed; returns the position and their number.

        These are the next so many, whether consumers have them or not; or all that are synced; or
        those that failed too often and block the subscription. The catalog has it first.
        """
        state, active = await self._find(topic, name)
        async with state.lock:
            subscription = active.subscription
            with subscription.frozen(moves=False):
                cursor = subscription.window.cursor()
                ranges, messages = await asyncio.to_thread(
                    _to_skip, state.storage, cursor, subscription.window.blocked, what
                )
                for start, end in ranges:
                    cursor = cursor.with_range(start, end)
                if ranges:
                    await asyncio.to_thread(state.storage.reset_cursor, name, cursor)
                subscription.skip(ranges, messages)
        return subscription.window.position, messages

    async def delete(self, topic: TopicName, name: str) -> None:
        """Deletes the subscription. The streams of its consumers end."""
        state, active = await self._find(topic, name)
        async with state.lock:
            await asyncio.to_thread(state.storage.delete_subscription, name)
            state.active.pop(name, None)
            for number in active.placed:
                self._places.pop(number, None)
            await active.subscription.close(save=False)

    async def forget(self, topic: TopicName) -> None:
        """Ends all subscriptions of a topic that was deleted."""
        state = self._topics.pop(topic, None)
        fanout = self.fanouts.pop(topic, None)
        self._fanout_names.pop(topic, None)
        if fanout is not None:
            fanout.close()
        for number in [at for at, place in self._places.items() if place.topic == topic]:
            del self._places[number]
        if state is not None:
            for active in [*state.active.values()]:
                await active.subscription.close(save=False)
            await state.feed.close()

    def topics(self) -> list[LoadedTopic]:
        """The topics whose subscriptions are loaded. For any thread."""
        return list(self._topics.copy().values())

    def loaded(self, topic: TopicName) -> LoadedTopic | None:
        """The subscriptions of a topic, if this process has loaded them. For any thread."""
        return self._topics.get(topic)

    # -- dead letters ---------------------------------------------------------------------------

    async def _store_dead_letter(
        self, state: _TopicState, delivery: Delivery, subscription: str
    ) -> None:
        """Appends the message to the dead-letter topic, and returns once it is synced."""
        source = state.storage.name
        name = self._settings_of(state).dead_letter_topic or source + _DEAD_LETTERS
        message = delivery.message
        copy = replace(
            message,
            msg_id=MessageId(message.msg_id.producer_id, str(parse_topic(name))),
            attributes={
                **message.attributes,
                "forebay-topic": source,
                "forebay-offset": str(delivery.offset),
                "forebay-subscription": subscription,
            },
        )
        await asyncio.to_thread(self._append_dead_letter, name, copy)
        metrics.DEAD_LETTERS.add(1, source, subscription)

    def _append_dead_letter(self, name: str, message: StreamMessage) -> None:
        self._store.storage(name).append_message(message, "synced")

    # -- the end --------------------------------------------------------------------------------

    def stop_delivering(self) -> None:
        """Delivers nothing more; acknowledgements still count."""
        for state in self._topics.values():
            for active in state.active.values():
                active.subscription.stop_delivering()

    def end_streams(self) -> None:
        """Ends the streams of all consumers."""
        for state in self._topics.values():
            for active in state.active.values():
                active.subscription.end_streams()
        for fanout in self.fanouts.values():
            fanout.close()

    @property
    def outstanding(self) -> int:
        """Messages that consumers who are connected have not acknowledged."""
        return sum(
            active.subscription.window.outstanding
            for state in self._topics.values()
            for active in state.active.values()
        )

    async def close(self) -> None:
        """Ends all subscriptions, and hands their cursors to the topics."""
        for fanout in self.fanouts.values():
            fanout.close()
        for state in [*self._topics.values()]:
            if self._settings.ack == "buffered":  # or cursors would lack what is not synced
                with suppress(ForebayError):  # the log says why, and what is not saved comes again
                    await asyncio.to_thread(state.storage.flush)
            for active in [*state.active.values()]:
                await active.subscription.close()
            await state.feed.close()
