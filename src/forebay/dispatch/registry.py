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
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, Protocol

from forebay import metrics as process_metrics
from forebay.catalog.nonreliable import nonreliable_topics
from forebay.catalog.subscriptions import note_listener, read_all
from forebay.dispatch import metrics
from forebay.dispatch.fanout import FanoutTopic
from forebay.dispatch.feed import ChunkCache, Delivery, Feed
from forebay.dispatch.policy import Policy, SubscriptionType
from forebay.dispatch.subscription import Consumer, Encode, Subscription
from forebay.dispatch.window import Window
from forebay.errors import (
    ForebayError,
    ServiceError,
    SubscriptionBusy,
    UnknownSubscription,
    UnknownTopic,
)
from forebay.format.cursor import Cursor
from forebay.format.message import MessageId, StreamMessage
from forebay.format.names import TopicName, parse_topic
from forebay.format.subscription import ConsumerRow, SubscriptionRow
from forebay.logs import event
from forebay.settings import BrokerSettings
from forebay.topic.storage import WalStorage
from forebay.topic.store import Store, Topic

_log: Final = logging.getLogger("forebay.dispatch")
_EXPECTED_SECONDS: Final = 10.0
"""How long a consumer that subscribed, and has not opened its stream, keeps its place."""
_SEEN_MS: Final = 3_600_000
"""How old the time at which a consumer was seen may be in the catalog."""
_LOAD_SECONDS: Final = 1.0
_DEAD_LETTERS: Final = "-dead-letters"
_SHOWN_MAX: Final = 1000


def stable_number(*names: str) -> int:
    """A number from 1 to 2^63 - 1 that is the same for the same names, in every run."""
    hashed = hashlib.blake2b(digest_size=8)
    for name in names:
        raw = name.encode("utf-8", "surrogatepass")
        hashed.update(len(raw).to_bytes(8, "little") + raw)
    return (int.from_bytes(hashed.digest(), "little") & (2**63 - 1)) or 1


@dataclass(slots=True)
class _Active:
    """A subscription that was loaded, with its row."""

    row: SubscriptionRow
    subscription: Subscription
    expected: dict[int, float] = field(default_factory=dict)
    """Consumers that subscribed and have not connected yet, and until when they are expected."""

    @property
    def kind(self) -> SubscriptionType:
        return SubscriptionType(self.row.kind)

    def others(self, number: int) -> list[str]:
        """The names of the other consumers that are connected, or about to."""
        now = time.monotonic()
        names = {each.number: each.name for each in self.subscription.consumers}
        known = {each.id: each.name for each in self.row.consumers}
        names |= {at: known.get(at, "") for at, until in self.expected.items() if until > now}
        return [name for at, name in names.items() if at != number]


@dataclass(slots=True)
class _TopicState:
    storage: WalStorage
    feed: Feed
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    active: dict[str, _Active] = field(default_factory=dict)


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

    def __init__(self, store: Store, settings: BrokerSettings) -> None:
        self._store = store
        self._settings = settings
        self._cache = ChunkCache()
        self._topics: dict[TopicName, _TopicState] = {}
        self._opening: dict[TopicName, asyncio.Lock] = {}
        self.fanouts: dict[TopicName, FanoutTopic] = {}
        """The non-reliable topics that are in use."""
        self._places: dict[int, _Place] = {}
        """Where each known consumer belongs."""
        self._loaded = asyncio.Event()
        process_metrics.collect_from(self)

    # -- known consumers ------------------------------------------------------------------------

    async def load(self) -> None:
        """Reads which consumers there are; tries again until the catalog responds."""
        while not self._loaded.is_set():
            try:
                found = await asyncio.to_thread(self._read_places)
            except ServiceError as error:
                event(_log, logging.WARNING, "subscriptions cannot be read yet", error=error)
                await asyncio.sleep(_LOAD_SECONDS)
                continue
            self._places = {**found, **self._places}
            self._loaded.set()

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
        """Whether it is the number of a consumer that has subscribed, in this run or before."""
        await self._loaded.wait()
        return number in self._places

    # -- topics ---------------------------------------------------------------------------------

    async def _state(self, topic: TopicName) -> _TopicState:
        """Opens the topic, and loads its subscriptions, on first use.

        Raises UnknownTopic if there is no such topic: only producers create topics.
        """
        found = self._topics.get(topic)
        if found is not None:
            return found
        async with self._opening.setdefault(topic, asyncio.Lock()):
            if topic in self._topics:
                return self._topics[topic]
            state = await self._open(topic)
            self._topics[topic] = state
            return state

    async def _open(self, topic: TopicName) -> _TopicState:
        def load() -> tuple[WalStorage, list[tuple[SubscriptionRow, Cursor]]]:
            if not self._store.exists(str(topic)):
                raise UnknownTopic(f"there is no topic {topic}: a producer creates it")
            storage = self._store.storage(str(topic))
            rows = storage.subscriptions()
            return storage, [(row, storage.subscription_cursor(row.name)) for row in rows]

        storage, found = await asyncio.to_thread(load)
        state = _TopicState(
            storage, Feed(Topic(storage), partial(self._reopen, topic), self._cache)
        )
        for row, cursor in found:
            self._activate(state, row, cursor)
        return state

    async def _reopen(self, topic: TopicName) -> Topic:
        """Opens a topic again whose log has ended."""
        storage = await asyncio.to_thread(self._store.storage, str(topic))
        state = self._topics.get(topic)
        if state is not None:
            state.storage = storage
        return Topic(storage)

    def _activate(self, state: _TopicState, row: SubscriptionRow, cursor: Cursor) -> _Active:
        window = Window(SubscriptionType(row.kind), self._policy(state), cursor)
        name = row.name
        subscription = Subscription(
            name,
            window,
            state.feed,
            lambda changed: state.storage.put_cursor(name, changed),
            partial(self._store_dead_letter, state),
            skip_lost=self._settings_of(state).on_lost == "skip",
        )
        active = state.active[name] = _Active(row, subscription)
        topic = parse_topic(state.storage.name)
        for consumer in row.consumers:
            self._places[consumer.id] = _Place(topic, name)
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
        subscription, or consumers are connected that use it as another type.
        """
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
            row = ConsumerRow(number, consumer, tuple(filters), int(time.time() * 1000))
            await self._note(state, active, row)
            active.expected[number] = time.monotonic() + _EXPECTED_SECONDS
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
        number = stable_number(topic.name, name, consumer)
        subscription = topic.subscription(name, kind)
        others = [each for at, each in subscription.consumers.items() if at != number]
        if kind is SubscriptionType.EXCLUSIVE and others:
            raise SubscriptionBusy(
                f"{topic.name}: the exclusive subscription {name!r} has the consumer "
                f"{others[0].name!r}; close that one, or subscribe with another type"
            )
        key = parse_topic(topic.name)
        now_ms = int(time.time() * 1000)
        row = SubscriptionRow(
            name, int(kind), now_ms, (ConsumerRow(number, consumer, tuple(filters), now_ms),)
        )
        catalog = self._store.catalog
        if catalog is not None:
            await asyncio.to_thread(note_listener, catalog, key, row)
        self._places[number] = _Place(key, name, row)
        return number

    async def _create(self, state: _TopicState, name: str, kind: SubscriptionType) -> _Active:
        row = SubscriptionRow(name, int(kind), int(time.time() * 1000))
        earliest = self._settings_of(state).subscription_start == "earliest"

        def create() -> tuple[SubscriptionRow, Cursor]:
            storage = state.storage
            start = storage.start_offset if earliest else storage.wal.current_offset()
            return storage.create_subscription(row, Cursor(start))

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
        await self._loaded.wait()
        place = self._places.get(number)
        if place is None:
            raise UnknownSubscription(f"there is no consumer {number}: subscribe first")
        topic, name = place.topic, place.name
        if place.fanout is not None:
            return self._connect_fanout(number, place.fanout, topic, encode)
        state = await self._state(topic)
        active = state.active.get(name)
        row = None
        if active is not None:
            row = next((each for each in active.row.consumers if each.id == number), None)
        if active is None or row is None:
            self._places.pop(number, None)
            raise UnknownSubscription(f"{topic} has no subscription {name!r}: subscribe again")
        consumer = Consumer(number, row.name, row.filters, encode)
        active.expected.pop(number, None)
        active.subscription.join(consumer, self._policy(state))
        return active.subscription, consumer

    def _connect_fanout(
        self, number: int, row: SubscriptionRow, topic: TopicName, encode: Encode
    ) -> tuple[Leavable, Consumer]:
        fanout = self.fanouts.setdefault(topic, FanoutTopic(str(topic)))
        subscription = fanout.subscription(row.name, SubscriptionType(row.kind))
        own = next(each for each in row.consumers if each.id == number)
        consumer = Consumer(number, own.name, own.filters, encode)
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

    async def seek(self, topic: TopicName, name: str, cursor: Cursor) -> None:
        """Moves the subscription to the cursor, in the catalog first."""
        state, active = await self._find(topic, name)
        async with state.lock:
            with active.subscription.frozen():
                await asyncio.to_thread(state.storage.reset_cursor, name, cursor)
                active.subscription.seek(cursor)

    async def delete(self, topic: TopicName, name: str) -> None:
        """Deletes the subscription. The streams of its consumers end."""
        state, active = await self._find(topic, name)
        async with state.lock:
            await asyncio.to_thread(state.storage.delete_subscription, name)
            state.active.pop(name, None)
            for consumer in active.row.consumers:
                self._places.pop(consumer.id, None)
            await active.subscription.close(save=False)

    async def forget(self, topic: TopicName) -> None:
        """Ends all subscriptions of a topic that was deleted."""
        state = self._topics.pop(topic, None)
        fanout = self.fanouts.pop(topic, None)
        if fanout is not None:
            fanout.close()
        for number in [at for at, place in self._places.items() if place.topic == topic]:
            del self._places[number]
        if state is not None:
            for active in state.active.values():
                await active.subscription.close(save=False)
            await state.feed.close()

    def loaded(self, topic: TopicName) -> dict[str, tuple[SubscriptionRow, Subscription]]:
        """The subscriptions of a topic that this process has loaded, by name."""
        state = self._topics.get(topic)
        if state is None:
            return {}
        return {name: (each.row, each.subscription) for name, each in state.active.items()}

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

    # -- metrics --------------------------------------------------------------------------------

    def collect(self) -> None:
        """Sets the gauges of the subscriptions that are loaded. Called on another thread."""
        shown = 0
        for state in list(self._topics.values()):
            synced = state.storage.wal.watermarks().synced
            for active in list(state.active.values()):
                if shown == _SHOWN_MAX:
                    return
                shown += 1
                self._show(state.storage.name, active.subscription, synced)

    def _show(self, topic: str, subscription: Subscription, synced: int) -> None:
        window, labels = subscription.window, (topic, subscription.name)
        metrics.POSITION.set(window.position, *labels)
        metrics.LAG.set(subscription.lag(synced), *labels)
        metrics.OUTSTANDING.set(window.outstanding, *labels)
        metrics.CONSUMERS.set(len(subscription.consumers), *labels)
        metrics.DELIVERED.set(subscription.delivered, *labels)
        metrics.REDELIVERED.set(window.counters.redelivered, *labels)
        failing = subscription.problem is not None or bool(window.blocked)
        metrics.FAILING.set(int(failing), *labels)

    # -- the end --------------------------------------------------------------------------------

    def stop_delivering(self) -> None:
        """Delivers nothing more; acknowledgements still count."""
        for state in self._topics.values():
            for active in state.active.values():
                active.subscription.stop_delivering()

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
        for state in self._topics.values():
            for active in state.active.values():
                await active.subscription.close()
            await state.feed.close()
