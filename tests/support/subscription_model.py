"""A subscription as its promises say it, with lists and sets: slow, and easy to check by eye.

`Model` does not decide what may be decided in several ways, such as whose turn it is. It says what
is allowed, and is told what was chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from forebay.dispatch.key_router import KeyRouter
from forebay.dispatch.policy import Policy, SubscriptionType
from forebay.format.cursor import Cursor

NEVER = 10**18


def matches(glob: str, key: str) -> bool:
    """What a filter means, by its definition."""
    if not glob:
        return not key
    if glob[0] == "*":
        return any(matches(glob[1:], key[at:]) for at in range(len(key) + 1))
    return bool(key) and glob[0] in ("?", key[0]) and matches(glob[1:], key[1:])


@dataclass
class Consumer:
    number: int
    name: str
    filters: tuple[str, ...]
    paused: bool = False

    def takes(self, key: str) -> bool:
        return not self.filters or any(matches(each, key) for each in self.filters)


@dataclass
class Held:
    """A message that was read, is not acknowledged, and is at no consumer."""

    why: str
    """redelivery, kept, blocked, dead, writing or retry."""
    time_ms: int = -1
    """From when on it may be sent, or written again."""


@dataclass
class Model:
    kind: SubscriptionType
    policy: Policy
    keys: Sequence[str | None]
    kept_max: int
    waiting_max: int
    now: int = 0
    seen: int = 0
    """The latest time at which the window looked for what is due."""
    consumers: list[Consumer] = field(default_factory=list)
    floor: int = 0
    acked: set[int] = field(default_factory=set)
    """Everything below the floor is acknowledged, too."""
    next: int = 0
    at: dict[int, int] = field(default_factory=dict)
    """Who has it."""
    deadline: dict[int, int] = field(default_factory=dict)
    held: dict[int, Held] = field(default_factory=dict)
    attempts: dict[int, int] = field(default_factory=dict)
    unwritten: dict[int, int] = field(default_factory=dict)
    counted: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(
            ("redelivered", "nacked", "timed_out", "dropped", "dead_letters", "skipped"), 0
        )
    )

    # -- what is where

    def is_acked(self, offset: int) -> bool:
        return offset < self.floor or offset in self.acked

    def group(self, offset: int) -> str | None:
        """None: it has no order."""
        if self.kind in (SubscriptionType.EXCLUSIVE, SubscriptionType.FAILOVER):
            return "the topic"
        if self.kind is SubscriptionType.SHARED:
            return None
        return self.keys[offset] or None

    def held_of(self, group: str) -> list[int]:
        return sorted(each for each in self.held if self.group(each) == group)

    def consumer(self, number: int) -> Consumer | None:
        return next((each for each in self.consumers if each.number == number), None)

    def unacked(self, consumer: Consumer) -> int:
        return sum(1 for each in self.at.values() if each == consumer.number)

    def room(self, consumer: Consumer) -> int:
        if consumer.paused:
            return 0
        return self.policy.max_unacked_messages - self.unacked(consumer)

    def waiting(self) -> int:
        return sum(1 for each in self.held.values() if each.why != "kept")

    def kept(self) -> int:
        return sum(1 for each in self.held.values() if each.why == "kept")

    # -- who may take a message

    def owner(self, key: str) -> Consumer | None:
        """Of the consumers that match the key, the one with the highest score."""
        router = KeyRouter()
        matching = [each for each in self.consumers if each.takes(key)]
        for each in matching:
            router.add(each.number, each.name, ())
        number = router.choose(key)
        return None if number is None else self.consumer(number)

    def takers(self, offset: int) -> list[Consumer]:
        """Who may get the message, room or not, if its turn in its group has come."""
        group = self.group(offset)
        if self.kind in (SubscriptionType.EXCLUSIVE, SubscriptionType.FAILOVER):
            return self.consumers[:1]
        if group is None:
            return [each for each in self.consumers if self.is_shared() or each.takes("")]
        owner = self.owner(group)
        elsewhere = [
            each
            for each, number in self.at.items()
            if self.group(each) == group and (owner is None or number != owner.number)
        ]
        return [owner] if owner is not None and not elsewhere else []

    def is_shared(self) -> bool:
        return self.kind is SubscriptionType.SHARED

    def takers_with_room(self, offset: int) -> list[Consumer]:
        return [each for each in self.takers(offset) if self.room(each) > 0]

    def is_sendable(self, offset: int) -> bool:
        held = self.held.get(offset)
        if held is None:
            return False
        return held.why == "kept" or (held.why == "redelivery" and held.time_ms <= self.seen)

    def is_first(self, offset: int) -> bool:
        group = self.group(offset)
        return group is None or not [each for each in self.held_of(group) if each < offset]

    def may_be_sent(self, offset: int) -> list[Consumer]:
        """Who may get a message that was read before, now."""
        if self.is_sendable(offset) and self.is_first(offset):
            return self.takers_with_room(offset)
        return []

    def wants_new(self) -> bool:
        if self.kind in (SubscriptionType.EXCLUSIVE, SubscriptionType.FAILOVER):
            return not self.held and any(self.room(each) > 0 for each in self.consumers[:1])
        if self.waiting() >= self.waiting_max or self.kept() >= self.kept_max:
            return False
        return any(self.room(each) > 0 for each in self.consumers)

    def new_may_go_to(self, offset: int) -> list[Consumer]:
        group = self.group(offset)
        if group is not None and self.held_of(group):
            return []
        return self.takers_with_room(offset)

    # -- what happens

    def tick(self, now_ms: int) -> None:
        self.now = max(self.now, now_ms)

    def look(self, now_ms: int) -> None:
        self.tick(now_ms)
        self.seen = self.now
        for held in self.held.values():
            if held.why == "retry" and held.time_ms <= self.seen:
                held.why = "dead"

    def join(self, number: int, name: str, filters: tuple[str, ...]) -> None:
        old = self.consumer(number)
        if old is None:
            self.consumers.append(Consumer(number, name, filters))
        else:
            self.release(number)
            old.name, old.filters, old.paused = name, filters, False

    def leave(self, number: int) -> None:
        self.release(number)
        self.consumers = [each for each in self.consumers if each.number != number]

    def release(self, number: int) -> None:
        for offset in [each for each, holder in self.at.items() if holder == number]:
            self.take_back(offset)
            self.held[offset] = Held("redelivery")

    def take_back(self, offset: int) -> None:
        del self.at[offset]
        self.deadline.pop(offset, None)

    def advance(self) -> None:
        self.next += 1
        while self.is_acked(self.next):
            self.next += 1

    def sent(self, offset: int, number: int) -> None:
        if offset == self.next:
            self.advance()
        elif self.held.pop(offset).why == "redelivery":
            self.counted["redelivered"] += 1
        self.at[offset] = number
        if self.policy.ack_timeout_ms is not None:
            self.deadline[offset] = self.now + self.policy.ack_timeout_ms

    def keep(self, offset: int) -> None:
        self.advance()
        self.held[offset] = Held("kept")

    def ack(self, start: int, end: int) -> int:
        """How many offsets it changed."""
        new = [each for each in range(start, end) if not self.is_acked(each)]
        for offset in new:
            held = self.held.pop(offset, None)
            self.counted["dead_letters"] += held is not None and held.why == "writing"
            if offset in self.at:
                self.take_back(offset)
            self.attempts.pop(offset, None)
            self.unwritten.pop(offset, None)
            self.acked.add(offset)
        while self.floor in self.acked:
            self.acked.remove(self.floor)
            self.floor += 1
        while self.is_acked(self.next):
            self.next += 1
        return len(new)

    def nack(self, offset: int, delay_ms: int | None) -> None:
        if offset in self.at:
            self.counted["nacked"] += 1
            self.fail(offset, delay_ms)

    def expire(self) -> None:
        late = sorted(each for each, time_ms in self.deadline.items() if time_ms <= self.now)
        for offset in late:
            self.counted["timed_out"] += 1
            self.fail(offset, None)

    def delay(self, times: int) -> int:
        delay = self.policy.redelivery_delay_ms
        for _ in range(times - 1):
            delay = min(2 * delay, self.policy.redelivery_delay_max_ms)
        return delay

    def fail(self, offset: int, delay_ms: int | None) -> None:
        self.take_back(offset)
        times = self.attempts[offset] = self.attempts.get(offset, 0) + 1
        most = self.policy.max_redeliveries
        if most is not None and times > most:
            if self.policy.poison == "drop":
                self.counted["dropped"] += 1
                self.ack(offset, offset + 1)
            else:
                self.held[offset] = Held("blocked" if self.policy.poison == "block" else "dead")
            return
        delay = self.delay(times) if delay_ms is None else delay_ms
        self.held[offset] = Held("redelivery", self.now + delay if delay else -1)

    def poisoned(self) -> list[int]:
        taken = sorted(each for each, held in self.held.items() if held.why == "dead")
        for offset in taken:
            self.held[offset].why = "writing"
        return taken

    def unpoison(self, offset: int) -> None:
        held = self.held.get(offset)
        if held is not None and held.why == "writing":
            times = self.unwritten[offset] = self.unwritten.get(offset, 0) + 1
            self.held[offset] = Held("retry", self.now + self.delay(times))

    def configure(self, policy: Policy) -> None:
        if policy.ack_timeout_ms != self.policy.ack_timeout_ms:
            self.deadline.clear()
            if policy.ack_timeout_ms is not None:
                self.deadline = dict.fromkeys(self.at, self.now + policy.ack_timeout_ms)
        self.policy = policy

    def start_at(self, cursor: Cursor) -> None:
        self.floor = self.next = cursor.position
        self.acked = {each for start, end in cursor.ranges for each in range(start, end)}
        for forgotten in (self.at, self.deadline, self.held, self.attempts, self.unwritten):
            forgotten.clear()

    # -- what must be true of the window

    def cursor(self) -> tuple[int, list[int]]:
        """The position, and the acknowledged offsets above it."""
        return self.floor, sorted(self.acked)

    def next_time(self) -> int:
        """When the first thing happens by itself."""
        times = [*self.deadline.values()]
        for held in self.held.values():
            waits = held.why == "redelivery" and held.time_ms > self.seen
            times += [held.time_ms] if waits or held.why == "retry" else []
        return min(times, default=NEVER)
