"""`Window`: who gets which message of a subscription, and what was acknowledged. It does no I/O.

The caller reads messages and offers them, sends what the window assigned, and tells it what the
consumers answer. It keeps only what is not acknowledged (the states are in `state.py`), so that an
acknowledgement removes something, and the acknowledged ranges are computed when a cursor is asked
for.

Messages of a group keep their order: the group is the topic (exclusive, failover) or the key
(key-shared). What is in a state from WAITING on holds back everything after it in its group that
is not at a consumer. Other messages have no group and hold back nobody.

Beware: every time comes from one clock that does not go back. An earlier time counts as the latest.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from heapq import heapify, heappop, heappush
from itertools import islice, takewhile
from operator import itemgetter
from typing import Final

from forebay.dispatch.key_filter import check_key_filters
from forebay.dispatch.key_router import Key, KeyRouter, kept_key
from forebay.dispatch.offsets import Offsets
from forebay.dispatch.policy import Policy, SubscriptionType
from forebay.dispatch.state import (
    BLOCKED,
    DEAD,
    KEPT,
    READY,
    RETRY,
    SENDABLE,
    SENT,
    WAITING,
    WRITING,
    Consumer,
    Group,
    Message,
)
from forebay.errors import UsageError
from forebay.format.cursor import Cursor
from forebay.limits import (
    NACK_DELAY_MS_MAX,
    OFFSET_MAX,
    SUBSCRIPTION_KEPT_MAX,
    SUBSCRIPTION_WAITING_MAX,
)

_TIMERS_MIN: Final = 64
"""Timers of messages that are gone are removed when there are more of them than this."""


class Verdict(Enum):
    """What became of an offered message."""

    SENT = "sent"
    """It is assigned to a consumer."""
    KEPT = "kept"
    """It stays in the window: nobody may take it now, the next message may be offered."""
    DONE = "done"
    """It was acknowledged before."""
    FULL = "full"
    """Nobody can take it: offer it again when `wants_new` says so."""


@dataclass(slots=True)
class Counters:
    """What happened since the window was made."""

    redelivered: int = 0
    """Messages sent again, for whatever reason."""
    nacked: int = 0
    timed_out: int = 0
    dropped: int = 0
    dead_letters: int = 0
    skipped: int = 0
    """Offsets without a message."""


@dataclass(frozen=True, slots=True)
class ConsumerState:
    consumer: int
    name: str
    filters: tuple[str, ...]
    unacked: int
    active: bool
    """Whether it gets messages: of a failover subscription one does."""
    paused: bool


class Window:
    """The state of one subscription. Not thread-safe."""

    def __init__(
        self,
        kind: SubscriptionType,
        policy: Policy,
        cursor: Cursor,
        *,
        kept_max: int = SUBSCRIPTION_KEPT_MAX,
        waiting_max: int = SUBSCRIPTION_WAITING_MAX,
    ) -> None:
        self.kind = kind
        self._kept_max = kept_max
        self._waiting_max = waiting_max
        self.policy = policy
        self._unacked_max = policy.max_unacked_messages
        self._topic = None if kind in _WITHOUT_ONE_GROUP else Group("")
        self._is_keyed = kind is SubscriptionType.KEY_SHARED
        self._router = KeyRouter()
        self._now = 0
        self._consumers: dict[int, Consumer] = {}
        """In the order of joining; the first is the active one of a failover."""
        self._ring: deque[Consumer] = deque()
        """Those that take turns; one that is not available leaves when it is its turn."""
        self._available = 0
        self._serving: dict[int, Consumer] = {}
        """Those that are available and may take the first message of a group."""
        self._alarms: list[tuple[int, int, Consumer]] = []
        """A heap: not later than the first time-out of a consumer."""
        self.counters = Counters()
        self._start_at(cursor)

    def configure(self, policy: Policy, now_ms: int) -> None:
        """Uses another policy from now on.

        If it has another ack time-out, that of what consumers have starts now. Redeliveries that
        wait keep their times, and what is blocked stays blocked.
        """
        self._now = max(self._now, now_ms)
        old, self.policy = self.policy, policy
        self._unacked_max = policy.max_unacked_messages
        for consumer in self._consumers.values():
            self._refresh(consumer)
        if policy.ack_timeout_ms != old.ack_timeout_ms:
            self._restart_timeouts()

    def _restart_timeouts(self) -> None:
        """So that of one consumer's messages the first still times out first."""
        self._alarms.clear()
        for consumer in self._consumers.values():
            consumer.alarmed = False
            for message in consumer.sent.values():
                self._start_timeout(message, consumer)

    def _start_at(self, cursor: Cursor) -> None:
        self._template = cursor
        self._next = cursor.position
        self._ahead = [*cursor.ranges]
        """Acknowledged ranges above the next offset; none of them touch it."""
        self._messages: OrderedDict[int, Message] = OrderedDict()
        """All that is not acknowledged and was read, ascending: nothing is ever put back."""
        self._groups: dict[Key, Group] = {}
        self._loose = Offsets()
        """Messages without a group that are READY or KEPT."""
        self._waiting = 0
        """Messages in the states WAITING, READY, BLOCKED, DEAD, WRITING and RETRY."""
        self._kept = 0
        self._blocked: set[int] = set()
        self._dead: list[int] = []
        self._timers: list[tuple[int, int]] = []
        """A heap of times and offsets: all messages WAITING and RETRY, and some that are gone."""

    # -- consumers

    def join(self, consumer: int, name: str, filters: Sequence[str], now_ms: int) -> None:
        """Adds a consumer, or gives it a new stream: then its messages are due at once, in order.

        It keeps its place in the order of a failover. Raises UsageError for a second consumer of an
        exclusive subscription, and for filters that are too many, too long or empty.
        """
        check_key_filters(filters)
        if self.kind is SubscriptionType.EXCLUSIVE and self._consumers.keys() - {consumer}:
            raise UsageError(
                f"consumer {name!r} cannot join: the subscription is exclusive and has a consumer"
            )
        self._now = max(self._now, now_ms)
        joined = Consumer(consumer, name, tuple(filters))
        old = self._consumers.get(consumer)
        self._consumers[consumer] = joined
        if old is not None:
            self._detach(old)
        self._router.add(consumer, name, filters if self._is_keyed else ())
        joined.takes_any = self._router.takes_empty_keys(consumer)
        self._refresh(joined)
        if old is not None:
            self._release(old)
        self._place_groups()

    def leave(self, consumer: int, now_ms: int) -> None:
        """Removes a consumer, if it is here. Its messages are due at once, in order."""
        self._now = max(self._now, now_ms)
        gone = self._consumers.pop(consumer, None)
        if gone is not None:
            self._detach(gone)
            self._release(gone)
            self._place_groups()

    def pause(self, consumer: int) -> None:
        """Sends nothing to the consumer until `resume`."""
        self._set_paused(consumer, paused=True)

    def resume(self, consumer: int) -> None:
        self._set_paused(consumer, paused=False)

    def _set_paused(self, consumer: int, *, paused: bool) -> None:
        found = self._consumers.get(consumer)
        if found is not None:
            found.paused = paused
            self._refresh(found)

    def _detach(self, gone: Consumer) -> None:
        """Nobody chooses it any more; it still has its messages."""
        self._router.remove(gone.number)
        self._refresh(gone)
        if gone.in_ring:
            self._ring.remove(gone)
        if gone.alarmed:
            self._alarms = [each for each in self._alarms if each[2] is not gone]
            heapify(self._alarms)

    def _release(self, gone: Consumer) -> None:
        for message in [*gone.sent.values()]:
            self._take_back(message)
            self._wait(message, 0)

    def _refresh(self, consumer: Consumer) -> None:
        """Computes again whether the consumer is available."""
        available = (
            not consumer.paused
            and len(consumer.sent) < self._unacked_max
            and self._consumers.get(consumer.number) is consumer
        )
        if available != consumer.available:
            consumer.available = available
            self._available += 1 if available else -1
            if available and consumer.takes_any and not consumer.in_ring:
                consumer.in_ring = True
                self._ring.append(consumer)
            self._list_serving(consumer)

    def _list_serving(self, consumer: Consumer) -> None:
        if consumer.available and consumer.ready:
            self._serving[consumer.number] = consumer
        elif self._serving.get(consumer.number) is consumer:
            del self._serving[consumer.number]

    # -- who takes what

    def _next_in_ring(self) -> Consumer | None:
        ring = self._ring
        while ring:
            consumer = ring[0]
            if consumer.available:
                ring.rotate(-1)
                return consumer
            consumer.in_ring = False
            ring.popleft()
        return None

    def _target(self, group: Group) -> Consumer | None:
        """Who gets the messages of the group, as soon as nobody else has any."""
        if group is self._topic:
            return next(iter(self._consumers.values()), None)
        if group.generation != self._router.generation:
            group.spot = self._router.spot(group.key)
            group.generation = self._router.generation
        return None if group.spot is None else self._consumers[group.spot.consumer]

    def _taker(self, group: Group) -> Consumer | None:
        """Who may take a message of the group now, whether or not it has room."""
        target = group.target = self._target(group)
        return target if group.owner is None or group.owner is target else None

    def _place_groups(self) -> None:
        """After consumers came or went: groups that wait may have other takers."""
        if self._topic is not None:
            self._place(self._topic)
        for group in self._groups.values():
            if group.queue and self._target(group) is not group.target:
                self._place(group)

    def _place(self, group: Group) -> None:
        """Puts the first message of the group's queue where its taker finds it."""
        first = group.queue.first
        place = None
        if first is not None and self._messages[first].state in SENDABLE:
            place = self._taker(group)
        if group.place is not None:
            group.place.ready.discard(group.place_at)
            self._list_serving(group.place)
        group.place = place
        if place is not None and first is not None:
            group.place_at = first
            place.ready.add(first)
            self._list_serving(place)

    def _settle(self, group: Group) -> None:
        """After a message of the group is gone."""
        if group.queue or group.place is not None:
            self._place(group)
        if not group.queue and not group.sent and group is not self._topic:
            del self._groups[group.key]

    # -- reading

    @property
    def next_offset(self) -> int:
        """The lowest offset that was never read and is not acknowledged."""
        return self._next

    def wants_new(self) -> bool:
        """Whether the message at `next_offset` can be sent or kept."""
        if self._topic is not None:
            taker = self._target(self._topic)
            return taker is not None and taker.available and not self._topic.queue
        if self._waiting >= self._waiting_max or self._kept >= self._kept_max:
            return False
        return self._available > 0

    def due(self, now_ms: int, limit: int) -> list[int]:
        """Returns at most `limit` offsets, ascending, that a consumer with room may take now.

        They are to be read again and offered in this order. Nothing changes until then.
        """
        self._pass_timers(now_ms)
        found: list[int] = []
        if self._loose and limit > 0:
            found.extend(islice(self._loose, self._room_in_ring(limit)))
        found.extend(self._due_in_groups(limit))
        found.sort()
        return found[:limit]

    def _due_in_groups(self, limit: int) -> list[int]:
        found: list[int] = []
        for consumer in [*self._serving.values()]:
            if len(found) >= limit:
                break
            found.extend(self._due_for(consumer, limit - len(found)))
            self._serving[consumer.number] = self._serving.pop(consumer.number)  # the others next
        return found

    def _room_in_ring(self, limit: int) -> int:
        room = 0
        for consumer in self._ring:
            if consumer.available:
                room += self._unacked_max - len(consumer.sent)
                if room >= limit:
                    return limit
        return room

    def _due_for(self, consumer: Consumer, limit: int) -> list[int]:
        """The first messages of its groups, each with those that may follow it at once."""
        room = min(limit, self._unacked_max - len(consumer.sent))
        found: list[int] = []
        for first in consumer.ready:
            if len(found) >= room:
                break
            group = self._messages[first].group
            assert group is not None
            follow = takewhile(self._is_sendable, group.queue)
            found.extend(islice(follow, room - len(found)))
        return found

    def _is_sendable(self, offset: int) -> bool:
        return self._messages[offset].state in SENDABLE

    def offer(self, offset: int, key: str | None, now_ms: int) -> tuple[Verdict, int | None]:
        """Decides who gets the message. With SENT, the second value is the consumer.

        The offset is `next_offset`, or a lower one, which need not be due any more. A higher one
        raises UsageError: what is between would be passed over. Only a key-shared subscription
        looks at the key; an empty one is none.
        """
        self._now = max(self._now, now_ms)
        if offset != self._next:
            return self._offer_again(offset)
        if not self.wants_new():
            return Verdict.FULL, None
        group = self._topic
        if group is None and key and self._is_keyed:
            group = self._group_of(kept_key(key))
        message = Message(offset, group, KEPT)
        consumer = self._next_in_ring() if group is None else self._free_taker(group)
        self._messages[offset] = message
        self._next = offset + 1
        if self._ahead:
            self._join_ahead()
        if consumer is None:
            return self._keep(message)
        self._send(message, consumer)
        return Verdict.SENT, consumer.number

    def _group_of(self, key: Key) -> Group:
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = Group(key)
        return group

    def _free_taker(self, group: Group) -> Consumer | None:
        """Who takes a new message of the group at once."""
        if group.queue:
            return None
        taker = self._taker(group)
        return taker if taker is not None and taker.available else None

    def _join_ahead(self) -> None:
        if self._ahead[0][0] == self._next:
            self._next = self._ahead.pop(0)[1]

    def _keep(self, message: Message) -> tuple[Verdict, None]:
        self._kept += 1
        if message.group is None:
            self._loose.add(message.offset)
        else:
            message.group.queue.add(message.offset)
            self._place(message.group)
        return Verdict.KEPT, None

    def _offer_again(self, offset: int) -> tuple[Verdict, int | None]:
        if offset > self._next:
            raise UsageError(f"offset {offset} was offered, but {self._next} is the next one")
        message = self._messages.get(offset)
        if message is None:
            return Verdict.DONE, None
        if message.state not in SENDABLE:
            return Verdict.KEPT, None
        group = message.group
        if group is None:
            consumer = self._next_in_ring()
        else:
            consumer = group.place if group.place_at == offset else None
        if consumer is None or not consumer.available:
            return Verdict.KEPT, None
        self._send_waiting(message, consumer)
        return Verdict.SENT, consumer.number

    def _send_waiting(self, message: Message, consumer: Consumer) -> None:
        if message.state == KEPT:
            self._kept -= 1
        else:
            self._waiting -= 1
            self.counters.redelivered += 1
        group = message.group
        if group is None:
            self._loose.discard(message.offset)
        else:
            group.queue.discard(message.offset)
        self._send(message, consumer)
        if group is not None:
            self._place(group)

    def _send(self, message: Message, consumer: Consumer) -> None:
        message.state = SENT
        message.consumer = consumer
        consumer.sent[message.offset] = message
        group = message.group
        if group is not None:
            group.sent += 1
            group.owner = consumer
        self._start_timeout(message, consumer)
        if len(consumer.sent) >= self._unacked_max:
            self._refresh(consumer)

    def _start_timeout(self, message: Message, consumer: Consumer) -> None:
        timeout = self.policy.ack_timeout_ms
        if timeout is not None:
            message.time_ms = self._now + timeout
            if not consumer.alarmed:
                self._set_alarm(consumer, message.time_ms)

    def _set_alarm(self, consumer: Consumer, time_ms: int) -> None:
        consumer.alarmed = True
        heappush(self._alarms, (time_ms, consumer.number, consumer))

    def skip(self, start: int, end: int) -> None:
        """Counts offsets from `start` to before `end` as acknowledged: they have no messages."""
        _check_range(start, end)
        self.counters.skipped += self._forget_range(start, min(end, self._next))
        self.counters.skipped += self._cover(start, end)

    def _cover(self, start: int, end: int) -> int:
        """Counts offsets that were never read as acknowledged; returns how many it changed."""
        start = max(start, self._next)
        if start >= end:
            return 0
        ahead = self._ahead
        low = bisect_left(ahead, start, key=itemgetter(1))
        high = bisect_right(ahead, end, key=itemgetter(0))
        touched = ahead[low:high]
        new = end - start - sum(min(end, last) - max(start, first) for first, last in touched)
        if touched:
            start, end = min(start, touched[0][0]), max(end, touched[-1][1])
        ahead[low:high] = [(start, end)]
        self._join_ahead()
        return new

    # -- answers

    def ack(self, start: int, end: int) -> bool:
        """Acknowledges the offsets from `start` to before `end`; returns whether it changed any.

        Those that wait or are kept count too: a late answer, or the decision of an operator. Raises
        UsageError, and changes nothing, if there is an offset that was never read and is not
        acknowledged either. So an answer from before a restart or a `seek` can be refused.
        """
        _check_range(start, end)
        if end > self._next:
            self._check_ahead(start, end)
        if end - start > 1:
            return self._forget_range(start, end) > 0
        message = self._messages.pop(start, None)
        if message is None:
            return False
        self._gone(message)
        return True

    def ack_unread(self, start: int, end: int) -> bool:
        """Acknowledges offsets that were not read yet, too; returns whether it changed any.

        For answers to what was delivered before a restart: the caller knows that it was.
        """
        _check_range(start, end)
        forgotten = self._forget_range(start, min(end, self._next))
        return self._cover(start, end) + forgotten > 0

    def _check_ahead(self, start: int, end: int) -> None:
        first = max(start, self._next)
        at = bisect_right(self._ahead, first, key=itemgetter(0)) - 1
        if at < 0 or self._ahead[at][1] < end:
            raise UsageError(
                f"offsets {start} to {end - 1} cannot be acknowledged: "
                "some were not delivered; wait until they are delivered again"
            )

    def _forget_range(self, start: int, end: int) -> int:
        """Acknowledges a range; returns how many messages were in the window."""
        if end - start < len(self._messages):
            there = [each for each in range(start, end) if each in self._messages]
        else:
            there = [each for each in self._messages if start <= each < end]
        for offset in there:
            self._gone(self._messages.pop(offset))
        return len(there)

    def _gone(self, message: Message) -> None:
        """The message was acknowledged, and removed from `_messages`."""
        group = message.group
        if message.state == SENT:
            consumer = message.consumer
            assert consumer is not None
            del consumer.sent[message.offset]
            if not consumer.available:
                self._refresh(consumer)
            if group is not None:
                group.sent -= 1
                if not group.sent:
                    group.owner = None
                    self._settle(group)
            return
        if message.state == KEPT:
            self._kept -= 1
        else:
            self._waiting -= 1
            self._blocked.discard(message.offset)
            self.counters.dead_letters += message.state == WRITING
        if group is not None:
            group.queue.discard(message.offset)
            self._settle(group)
        elif message.state in SENDABLE:
            self._loose.discard(message.offset)

    def nack(self, offset: int, delay_ms: int | None, now_ms: int) -> None:
        """Has the message delivered again after the delay, or after that of the policy.

        It counts as a failed attempt. Ignored if no consumer has the message. Raises UsageError if
        the delay is negative or too long.
        """
        if delay_ms is not None and not 0 <= delay_ms <= NACK_DELAY_MS_MAX:
            raise UsageError(f"a nack's delay is {delay_ms} ms, not 0 to {NACK_DELAY_MS_MAX}")
        self._now = max(self._now, now_ms)
        message = self._messages.get(offset)
        if message is not None and message.state == SENT:
            self.counters.nacked += 1
            self._fail(message, delay_ms)

    def expire(self, now_ms: int) -> None:
        """Takes back what was not acknowledged in time; each counts as a failed attempt."""
        self._pass_timers(now_ms)
        while self._alarms and self._alarms[0][0] <= self._now:
            consumer = heappop(self._alarms)[2]
            consumer.alarmed = False
            late = takewhile(lambda each: each.time_ms <= self._now, consumer.sent.values())
            for message in [*late]:
                self.counters.timed_out += 1
                self._fail(message, None)
            for message in consumer.sent.values():
                self._set_alarm(consumer, message.time_ms)
                break

    def _fail(self, message: Message, delay_ms: int | None) -> None:
        self._take_back(message)
        message.attempts += 1
        if self.policy.is_poison(message.attempts):
            self._poison(message)
        else:
            delay = self.policy.delay_ms(message.attempts) if delay_ms is None else delay_ms
            self._wait(message, delay)

    def _take_back(self, message: Message) -> None:
        """The consumer does not have the message any more; the caller gives it another state."""
        consumer, group = message.consumer, message.group
        assert consumer is not None
        message.consumer = None
        del consumer.sent[message.offset]
        if not consumer.available:
            self._refresh(consumer)
        if group is not None:
            group.sent -= 1
            if not group.sent:
                group.owner = None

    def _wait(self, message: Message, delay_ms: int) -> None:
        self._waiting += 1
        if delay_ms > 0:
            self._set_timer(message, WAITING, delay_ms)
        else:
            message.state = READY
            if message.group is None:
                self._loose.add(message.offset)
        self._queue(message)

    def _queue(self, message: Message) -> None:
        """From here on the message holds back those after it in its group."""
        if message.group is not None:
            message.group.queue.add(message.offset)
            self._place(message.group)

    def _set_timer(self, message: Message, state: int, delay_ms: int) -> None:
        message.state = state
        if len(self._timers) > 2 * self._waiting + _TIMERS_MIN:
            self._timers = [each for each in self._timers if each[1] in self._messages]
            heapify(self._timers)
        heappush(self._timers, (self._now + delay_ms, message.offset))

    def _pass_timers(self, now_ms: int) -> None:
        self._now = max(self._now, now_ms)
        while self._timers and self._timers[0][0] <= self._now:
            message = self._messages.get(heappop(self._timers)[1])
            if message is not None:
                self._wake(message)

    def _wake(self, message: Message) -> None:
        if message.state == RETRY:
            message.state = DEAD
            self._dead.append(message.offset)
            return
        message.state = READY
        if message.group is None:
            self._loose.add(message.offset)
        else:
            self._place(message.group)

    # -- messages that failed too often

    def _poison(self, message: Message) -> None:
        if self.policy.poison == "drop":
            self.counters.dropped += 1
            del self._messages[message.offset]
            if message.group is not None:
                self._settle(message.group)
            return
        self._waiting += 1
        if self.policy.poison == "block":
            message.state = BLOCKED
            self._blocked.add(message.offset)
        else:
            message.state = DEAD
            message.attempts = 0
            self._dead.append(message.offset)
        self._queue(message)

    def poisoned(self) -> list[int]:
        """Takes the offsets that must be written to the dead-letter topic, ascending.

        Each is returned once. Call `ack` when it is written, `unpoison` when that failed; until
        `ack` it holds back its group.
        """
        taken, self._dead = sorted(set(self._dead)), []
        there = [each for each in taken if self._state(each) == DEAD]
        for offset in there:
            self._messages[offset].state = WRITING
        return there

    def unpoison(self, offset: int, now_ms: int) -> None:
        """Has `poisoned` return the offset again, after the delay of the policy. Ignored if it did
        not return it before."""
        self._now = max(self._now, now_ms)
        message = self._messages.get(offset)
        if message is not None and message.state == WRITING:
            message.attempts += 1
            self._set_timer(message, RETRY, self.policy.delay_ms(message.attempts))

    def _state(self, offset: int) -> int | None:
        message = self._messages.get(offset)
        return None if message is None else message.state

    def next_time_ms(self) -> int | None:
        """When time alone gives `expire`, `due` or `poisoned` something to do. Never too late; it
        can be too early, and then `expire` moves it on."""
        times = [each[0][0] for each in (self._alarms, self._timers) if each]
        return min(times, default=None)

    # -- state

    @property
    def position(self) -> int:
        """The lowest offset that is not acknowledged."""
        return next(iter(self._messages), self._next)

    @property
    def outstanding(self) -> int:
        """How many messages consumers have and have not acknowledged."""
        return len(self._messages) - self._waiting - self._kept

    @property
    def waiting(self) -> int:
        """How many messages wait for redelivery or failed too often."""
        return self._waiting

    @property
    def kept(self) -> int:
        return self._kept

    @property
    def blocked(self) -> list[int]:
        """Messages that failed too often and stay until somebody decides."""
        return sorted(self._blocked)

    @property
    def consumers(self) -> list[ConsumerState]:
        """In the order they joined."""
        active = None if self._topic is None else self._target(self._topic)
        return [
            ConsumerState(
                each.number,
                each.name,
                each.filters,
                len(each.sent),
                self._topic is None or each is active,
                each.paused,
            )
            for each in self._consumers.values()
        ]

    def cursor(self) -> Cursor:
        """What is acknowledged. The other fields are those of the cursor it started from."""
        ranges: list[tuple[int, int]] = []
        end: int | None = None
        for offset in self._messages:
            if end is not None and offset > end:
                ranges.append((end, offset))
            end = offset + 1
        if end is not None and end < self._next:
            ranges.append((end, self._next))
        ranges.extend(self._ahead)
        return replace(self._template, position=self.position, ranges=tuple(ranges))

    def seek(self, cursor: Cursor) -> None:
        """Starts again at the cursor. Consumers stay; what they have is forgotten.

        An acknowledgement of what was sent before is refused, ignored, or taken for one of the new
        delivery, whichever the offset allows.
        """
        self._start_at(cursor)
        self._alarms.clear()
        self._serving.clear()
        if self._topic is not None:
            self._topic = Group("")
        for consumer in self._consumers.values():
            consumer.sent.clear()
            consumer.ready.clear()
            consumer.alarmed = False
            self._refresh(consumer)


_WITHOUT_ONE_GROUP: Final = frozenset({SubscriptionType.SHARED, SubscriptionType.KEY_SHARED})


def _check_range(start: int, end: int) -> None:
    if not 0 <= start < end <= OFFSET_MAX:
        raise UsageError(f"{start} to {end} is not a range of offsets")
