"""Random steps through a window and its model, compared after each of them.

python -m support.subscription_walk SEED [--steps N]     # in the directory tests: one walk again
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from dataclasses import asdict, replace

from forebay.dispatch.policy import POISON_ACTIONS, Policy, SubscriptionType
from forebay.dispatch.window import Verdict, Window
from forebay.errors import UsageError
from forebay.format.cursor import Cursor, decode_cursor_row, encode_cursor_row
from support.subscription_model import NEVER, Consumer, Model

KEYS = (None, None, "", "a", "a", "b", "ab", "abc", "b1", "b22", "zz")
FILTERS: tuple[tuple[str, ...], ...] = ((), (), (), ("a*",), ("*",), ("b?", "a"), ("*b*", "z?"))
CONSUMERS = 5


def random_policy(chance: random.Random) -> Policy:
    return Policy(
        max_unacked_messages=chance.choice((1, 2, 4, 8)),
        ack_timeout_ms=chance.choice((None, 50, 400)),
        redelivery_delay_ms=chance.choice((0, 10, 30)),
        redelivery_delay_max_ms=chance.choice((30, 100)),
        max_redeliveries=chance.choice((None, None, None, 0, 1, 3)),
        poison=chance.choice(POISON_ACTIONS),
    )


class Walk:
    """One window from its start to the end of its topic."""

    def __init__(self, seed: int, steps: int) -> None:
        self.chance = random.Random(seed)
        self.steps = steps
        self.kind = self.chance.choice([*SubscriptionType])
        self.policy = random_policy(self.chance)
        self.end = 0
        self.keys: list[str | None] = [self.chance.choice(KEYS) for _ in range(4 * steps + 100)]
        self.kept_max, self.waiting_max = self.chance.choice((1, 4, 20)), 6
        self.now = 0
        self.model = Model(self.kind, self.policy, self.keys, self.kept_max, self.waiting_max)
        self.window = self.made(Cursor())
        self.last: str = "nothing"

    def made(self, cursor: Cursor) -> Window:
        kept_max, waiting_max = self.kept_max, self.waiting_max
        return Window(self.kind, self.policy, cursor, kept_max=kept_max, waiting_max=waiting_max)

    def run(self) -> None:
        weighted = [step for step, weight in WEIGHTS for _ in range(weight)]
        for _ in range(self.steps):
            step = self.chance.choice(weighted)
            self.last = step.__name__
            step(self)
            self.check()
        self.finish()

    # -- steps

    def time(self) -> int:
        """Now; rarely a moment before, as a clock says that was set back."""
        self.now += self.chance.choice((0, 0, 1, 5))
        return max(0, self.now - (self.chance.randrange(100) if self.one_in(50) else 0))

    def one_in(self, times: int) -> bool:
        return self.chance.randrange(times) == 0

    def any_offset(self) -> int:
        low = max(0, self.model.floor - 3)
        return self.chance.randint(low, max(low, self.model.next - 1))

    def join(self) -> None:
        number, now = self.chance.randrange(CONSUMERS), self.time()
        filters, name = self.chance.choice(FILTERS), f"consumer-{number}"
        others = [each for each in self.model.consumers if each.number != number]
        if self.kind is SubscriptionType.EXCLUSIVE and others:
            assert refused(lambda: self.window.join(number, name, filters, now))
        else:
            self.window.join(number, name, filters, now)
            self.model.tick(now)
            self.model.join(number, name, filters)

    def leave(self) -> None:
        number, now = self.chance.randrange(CONSUMERS), self.time()
        self.window.leave(number, now)
        self.model.tick(now)
        self.model.leave(number)

    def pause(self) -> None:
        number, paused = self.chance.randrange(CONSUMERS), self.one_in(4)
        (self.window.pause if paused else self.window.resume)(number)
        found = self.model.consumer(number)
        if found is not None:
            found.paused = paused

    def offer_new(self) -> None:
        for _ in range(self.chance.randint(1, 4)):
            self.end = max(self.end, self.model.next + 1)
            if self.end > len(self.keys) - 20:
                return
            if self.offer(self.model.next) is Verdict.FULL:
                return

    def offer(self, offset: int) -> Verdict:
        now = self.time()
        self.model.tick(now)
        verdict, chosen = self.window.offer(offset, self.keys[offset], now)
        if offset == self.model.next:
            self.offered_new(offset, verdict, chosen)
        else:
            self.offered_again(offset, verdict, chosen)
        assert (chosen is not None) == (verdict is Verdict.SENT)
        return verdict

    def offered_new(self, offset: int, verdict: Verdict, chosen: int | None) -> None:
        allowed = self.model.new_may_go_to(offset)
        if not self.model.wants_new():
            assert verdict is Verdict.FULL
        elif allowed:
            assert verdict is Verdict.SENT
            assert chosen in numbers(allowed)
            self.model.sent(offset, chosen)
        else:
            assert verdict is Verdict.KEPT
            assert self.kind is SubscriptionType.KEY_SHARED
            self.model.keep(offset)

    def offered_again(self, offset: int, verdict: Verdict, chosen: int | None) -> None:
        allowed = self.model.may_be_sent(offset)
        if self.model.is_acked(offset):
            assert verdict is Verdict.DONE
        elif allowed:
            assert verdict is Verdict.SENT
            assert chosen in numbers(allowed)
            self.model.sent(offset, chosen)
        else:
            assert verdict is Verdict.KEPT

    def offer_stale(self) -> None:
        """An offset that need not be due any more, and one that is too high."""
        if self.model.next:
            self.offer(self.any_offset())
        assert refused(lambda: self.window.offer(self.model.next + 1, None, self.now))

    def offer_due(self) -> None:
        now, limit = self.time(), self.chance.choice((1, 2, 5, 100))
        found = self.window.due(now, limit)
        self.model.look(now)
        self.check_due(found, limit)
        for offset in found:
            if self.one_in(20):
                break  # it could not be read
            self.offer(offset)

    def ack(self) -> None:
        if self.model.at and not self.one_in(10):
            offset = self.chance.choice([*self.model.at])
            changed = self.window.ack(offset, offset + 1)
            assert changed
            assert self.model.ack(offset, offset + 1) == 1
            return
        start = self.any_offset()
        end = start + self.chance.randint(1, 8)
        if any(not self.model.is_acked(each) for each in range(self.model.next, end)):
            assert refused(lambda: self.window.ack(start, end))
        else:
            assert self.window.ack(start, end) == (self.model.ack(start, end) > 0)

    def nack(self) -> None:
        offset = self.any_offset()
        if self.model.at and not self.one_in(10):
            offset = self.chance.choice([*self.model.at])
        now, delay = self.time(), self.chance.choice((None, None, 0, 5, 200))
        self.window.nack(offset, delay, now)
        self.model.tick(now)
        self.model.nack(offset, delay)

    def expire(self) -> None:
        self.now += self.chance.choice((0, 3, 20, 60, 500, 5000))
        self.expire_at(self.time())

    def expire_at(self, now: int) -> None:
        self.window.expire(now)
        self.model.look(now)
        self.model.expire()
        time = self.window.next_time_ms()
        assert time is None or time > self.model.now, "it would be called again at once"

    def expire_in_time(self) -> None:
        """At the time that the window says, and not before."""
        time = self.window.next_time_ms()
        if time is not None:
            self.now = max(self.now, time)
            self.expire_at(self.time())

    def skip(self) -> None:
        start = self.any_offset() + self.chance.choice((0, 0, 1, 4))
        end = start + self.chance.randint(1, 6)
        if end < len(self.keys) - 20:
            self.window.skip(start, end)
            self.model.counted["skipped"] += self.model.ack(start, end)
            self.end = max(self.end, end)

    def write_dead_letters(self) -> None:
        found = self.window.poisoned()
        assert found == self.model.poisoned()
        for offset in found:
            if self.one_in(2):
                assert self.window.ack(offset, offset + 1)
                self.model.ack(offset, offset + 1)
            else:
                self.fail_to_write(offset)
        self.fail_to_write(self.any_offset())

    def fail_to_write(self, offset: int) -> None:
        now = self.time()
        self.window.unpoison(offset, now)
        self.model.tick(now)
        self.model.unpoison(offset)

    def ack_unread(self) -> None:
        """As after a restart: what was delivered before it is acknowledged now."""
        start = self.any_offset() + self.chance.choice((0, 1, 3, 9))
        end = start + self.chance.randint(1, 4)
        if end < len(self.keys) - 20:
            assert self.window.ack_unread(start, end) == (self.model.ack(start, end) > 0)
            self.end = max(self.end, end)

    def configure(self) -> None:
        now = self.time()
        self.policy = random_policy(self.chance)
        self.window.configure(self.policy, now)
        self.model.tick(now)
        self.model.configure(self.policy)

    def decide(self) -> None:
        """An operator acknowledges a message that is blocked."""
        for offset in self.window.blocked[:1]:
            assert self.window.ack(offset, offset + 1)
            self.model.ack(offset, offset + 1)

    def seek(self) -> None:
        cursor = Cursor(self.chance.randint(max(0, self.model.floor - 30), self.model.next + 2))
        for _ in range(self.chance.randrange(4)):
            start = cursor.position + self.chance.randint(1, 12)
            cursor = cursor.with_range(start, start + self.chance.randint(1, 3))
        self.window.seek(cursor)
        self.model.start_at(cursor)
        self.end = max(self.end, cursor.position, *(end for _, end in cursor.ranges), 0)

    def restart(self) -> None:
        cursor = decode_cursor_row(encode_cursor_row(self.window.cursor()), "a cursor")
        if self.one_in(2):  # as if the highest ranges had not fitted into the row
            left = self.chance.randint(0, len(cursor.ranges))
            cursor = replace(cursor, ranges=cursor.ranges[:left])
        self.window = self.made(cursor)
        self.model.start_at(cursor)
        self.model.consumers.clear()
        self.model.now = self.model.seen = 0
        self.model.counted = dict.fromkeys(self.model.counted, 0)
        for _ in range(self.chance.randrange(4)):
            self.join()

    # -- checks

    def check(self) -> None:
        window, model = self.window, self.model
        cursor = window.cursor()
        ranges = [each for start, end in cursor.ranges for each in range(start, end)]
        assert (cursor.position, ranges) == model.cursor()
        assert window.position == cursor.position
        assert cursor == Cursor(cursor.position).merged(cursor), "the ranges are ascending"
        assert window.next_offset == model.next
        known = {*model.at, *model.held}
        lost = {each for each in range(model.floor, model.next) if not model.is_acked(each)} - known
        assert not lost
        counts = (window.outstanding, window.waiting, window.kept)
        assert counts == (len(model.at), model.waiting(), model.kept())
        blocked = [each for each, held in model.held.items() if held.why == "blocked"]
        assert window.blocked == sorted(blocked)
        assert asdict(window.counters) == model.counted
        self.check_consumers()
        assert window.wants_new() == model.wants_new()
        time = window.next_time_ms()
        assert (NEVER if time is None else time) <= model.next_time()

    def check_consumers(self) -> None:
        all_active = self.kind in (SubscriptionType.SHARED, SubscriptionType.KEY_SHARED)
        wanted = [
            (each.number, each.name, each.filters, self.model.unacked(each), all_active or not at)
            for at, each in enumerate(self.model.consumers)
        ]
        found = self.window.consumers
        assert [(e.consumer, e.name, e.filters, e.unacked, e.active) for e in found] == wanted

    def check_due(self, found: list[int], limit: int) -> None:
        """Nothing that may not be sent, and nothing left out that could have been."""
        model = self.model
        assert found == sorted(set(found))
        assert len(found) <= limit
        for offset in found:
            assert model.is_sendable(offset)
            assert model.takers_with_room(offset)
            group = model.group(offset)
            if group is not None:
                assert {each for each in model.held_of(group) if each <= offset} <= {*found}
        if len(found) == limit:
            return
        for offset in model.held.keys() - {*found}:
            takers = model.may_be_sent(offset)
            room = sum(model.room(each) for each in takers)
            same = [each for each in found if model.takers_with_room(each) == takers]
            assert len(same) >= room, f"{offset} is due, and {numbers(takers)} could take it"

    # -- the end

    def finish(self) -> None:
        """Everything reaches a consumer that takes it, in a bounded number of rounds."""
        self.last = "finish"
        for consumer in [*self.model.consumers]:
            self.window.leave(consumer.number, self.now)
            self.model.leave(consumer.number)
        self.model.tick(self.now)
        self.window.join(9, "the last", (), self.now)
        self.model.join(9, "the last", ())
        for _ in range(20 * (self.end + 10)):
            if self.model.floor >= self.end:
                return
            self.round()
            self.check()
        raise AssertionError(f"stuck at {self.model.floor}, {self.model.held}")

    def round(self) -> None:
        """What a caller does that answers every message, and waits when there is nothing to do."""
        before = self.model.floor
        for offset in [*self.window.blocked, *self.window.poisoned()]:
            self.window.ack(offset, offset + 1)
            self.model.poisoned()
            self.model.ack(offset, offset + 1)
        found = self.window.due(self.now, 100)
        self.model.look(self.now)
        self.check_due(found, 100)
        for offset in found:
            self.offer(offset)
        while self.window.wants_new() and self.model.next < self.end:
            self.offer(self.model.next)
        for offset in [*self.model.at]:
            assert self.window.ack(offset, offset + 1)
            self.model.ack(offset, offset + 1)
        if self.model.floor == before and not found:
            self.expire_in_time()


WEIGHTS: tuple[tuple[Callable[[Walk], None], int], ...] = (
    (Walk.join, 12),
    (Walk.leave, 6),
    (Walk.pause, 10),
    (Walk.offer_new, 60),
    (Walk.offer_due, 60),
    (Walk.offer_stale, 5),
    (Walk.ack, 80),
    (Walk.nack, 25),
    (Walk.expire, 10),
    (Walk.expire_in_time, 20),
    (Walk.skip, 4),
    (Walk.write_dead_letters, 15),
    (Walk.decide, 4),
    (Walk.ack_unread, 4),
    (Walk.configure, 3),
    (Walk.seek, 1),
    (Walk.restart, 1),
)


def numbers(consumers: list[Consumer]) -> list[int]:
    return [each.number for each in consumers]


def refused(call: Callable[[], object]) -> bool:
    try:
        call()
    except UsageError:
        return True
    return False


def walk(seed: int, steps: int) -> None:
    """Raises AssertionError, with what it takes to repeat it, if window and model differ."""
    way = Walk(seed, steps)
    try:
        way.run()
    except Exception as error:
        raise AssertionError(
            f"seed {seed}, {steps} steps, {way.kind.name}, {way.policy}: after {way.last}: {error}"
        ) from error


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("seed", type=int)
    parser.add_argument("--steps", type=int, default=300)
    asked = parser.parse_args()
    walk(asked.seed, asked.steps)


if __name__ == "__main__":
    main()
