"""Who gets which message: the promises of each type of subscription."""

from __future__ import annotations

from collections import Counter

import pytest

from forebay.dispatch.policy import Policy, SubscriptionType
from forebay.dispatch.window import Verdict
from forebay.errors import UsageError
from forebay.limits import KEY_CHARACTERS_MAX, SUBSCRIPTION_KEPT_MAX
from support.subscriptions import feed, feed_due, offsets, window

EXCLUSIVE, SHARED = SubscriptionType.EXCLUSIVE, SubscriptionType.SHARED
FAILOVER, KEY_SHARED = SubscriptionType.FAILOVER, SubscriptionType.KEY_SHARED
KEYS = [f"key-{number}" for number in range(200)]


# ---- exclusive and failover ----


def test_an_exclusive_subscription_has_one_consumer() -> None:
    made = window(EXCLUSIVE)
    with pytest.raises(UsageError, match="exclusive"):
        made.join(2, "c2", (), 0)
    assert [each.consumer for each in made.consumers] == [1]
    made.leave(1, 0)
    made.join(2, "c2", (), 0)
    assert feed(made, 1) == [(0, 2)]


def test_the_consumer_that_joined_first_is_active_and_the_next_one_follows() -> None:
    made = window(FAILOVER, (3, 1, 2))
    assert [each.active for each in made.consumers] == [True, False, False]
    assert feed(made, 3) == [(0, 3), (1, 3), (2, 3)]
    made.ack(1, 2)
    made.leave(3, 0)
    assert not made.wants_new(), "what is not acknowledged comes first"
    assert feed_due(made, 0) == [(0, 1), (2, 1)]
    assert feed(made, 1) == [(3, 1)]
    made.leave(2, 0)
    assert feed(made, 1) == [(4, 1)], "one that waits can go"


def test_an_active_consumer_that_takes_over_its_own_stream_stays_active() -> None:
    made = window(FAILOVER, (1, 2))
    feed(made, 1)
    made.join(1, "c1", (), 0)
    assert [(each.consumer, each.active) for each in made.consumers] == [(1, True), (2, False)]
    assert feed_due(made, 0) == [(0, 1)]


def test_a_full_active_consumer_does_not_pass_messages_on() -> None:
    made = window(FAILOVER, (1, 2), Policy(max_unacked_messages=1))
    assert feed(made, 2) == [(0, 1)]
    assert not made.wants_new()


# ---- shared ----


def test_consumers_of_a_shared_subscription_take_turns() -> None:
    made = window(SHARED, (1, 2, 3))
    assert [consumer for _, consumer in feed(made, 7)] == [1, 2, 3, 1, 2, 3, 1]


def test_consumers_without_room_are_passed_over_and_come_back() -> None:
    made = window(SHARED, (1, 2, 3), Policy(max_unacked_messages=2))
    made.pause(2)
    assert [consumer for _, consumer in feed(made, 5)] == [1, 3, 1, 3]
    made.resume(2)
    assert [consumer for _, consumer in feed(made, 3)] == [2, 2]
    made.ack(0, 1)
    assert [consumer for _, consumer in feed(made, 3)] == [1]


def test_turns_stay_fair_when_consumers_answer_at_once() -> None:
    made = window(SHARED, range(5), Policy(max_unacked_messages=1))
    got: Counter[int | None] = Counter()
    for offset in range(1000):
        _, consumer = made.offer(offset, None, 0)
        got[consumer] += 1
        made.ack(offset, offset + 1)
    assert set(got.values()) == {200}


def test_redeliveries_take_turns_too() -> None:
    made = window(SHARED, (1, 2))
    feed(made, 4)
    made.leave(1, 0)
    made.join(3, "c3", (), 0)
    assert sorted(consumer or 0 for _, consumer in feed_due(made, 0)) == [2, 3]


def test_due_returns_no_more_than_there_is_room_for() -> None:
    made = window(SHARED, (1, 2), Policy(max_unacked_messages=5))
    feed(made, 10)
    made.leave(2, 0)
    made.ack(0, 1)
    made.ack(2, 3)
    assert len(made.due(0, 100)) == 2


# ---- key-shared ----


def test_a_key_stays_at_its_consumer() -> None:
    made = window(KEY_SHARED, (1, 2, 3), Policy(max_unacked_messages=1000))
    owners = dict(zip(KEYS, (who for _, who in feed(made, 200, KEYS)), strict=True))
    assert set(owners.values()) == {1, 2, 3}
    again = dict(zip(KEYS, (who for _, who in feed(made, 200, KEYS)), strict=True))
    assert again == owners


def test_only_the_keys_that_must_move_do() -> None:
    made = window(KEY_SHARED, (1, 2, 3), Policy(max_unacked_messages=1000))

    def owners() -> dict[str, int | None]:
        given = [who for _, who in feed(made, len(KEYS), KEYS)]
        made.ack(0, made.next_offset)
        return dict(zip(KEYS, given, strict=True))

    before = owners()
    made.join(4, "c4", (), 0)
    after = owners()
    moved = {key for key in KEYS if before[key] != after[key]}
    assert moved == {key for key in KEYS if after[key] == 4}
    assert 20 < len(moved) < 90
    made.leave(4, 0)
    assert owners() == before
    made.leave(2, 0)
    rest = owners()
    assert {key for key in KEYS if before[key] != rest[key]} == {
        key for key in KEYS if before[key] == 2
    }


def key_of(consumer: int) -> str:
    """A key of consumer 1 or 2, if both are there; alone, each has all of them."""
    both = window(KEY_SHARED, (1, 2), Policy(max_unacked_messages=1000))
    given = zip(KEYS, feed(both, 200, KEYS), strict=True)
    return next(key for key, (_, who) in given if who == consumer)


def test_a_key_moves_only_when_its_old_consumer_has_answered() -> None:
    key = key_of(2)
    made = window(KEY_SHARED)
    feed(made, 2, [key])
    made.join(2, "c2", (), 0)
    assert made.offer(2, key, 0) == (Verdict.KEPT, None)
    made.ack(0, 1)
    assert made.due(0, 10) == []
    made.ack(1, 2)
    assert made.due(0, 10) == [2]
    assert feed_due(made, 0) == [(2, 2)]
    assert made.counters.redelivered == 0, "what was kept was never sent before"


def test_a_key_moves_with_its_redeliveries_first() -> None:
    key = key_of(2)
    made = window(KEY_SHARED)
    feed(made, 2, [key])
    made.join(2, "c2", (), 0)
    feed(made, 1, [key])
    made.nack(0, 50, 0)
    made.nack(1, 10, 0)
    assert made.due(49, 10) == []
    assert feed_due(made, 50) == [(0, 2), (1, 2), (2, 2)]


def test_a_dropped_message_lets_its_key_move() -> None:
    key = key_of(2)
    made = window(KEY_SHARED, policy=Policy(max_redeliveries=0, poison="drop"))
    feed(made, 1, [key])
    made.join(2, "c2", (), 0)
    feed(made, 1, [key])
    made.nack(0, None, 0)
    assert feed_due(made, 0) == [(1, 2)]


def test_a_key_goes_back_to_its_old_consumer_when_the_new_one_leaves() -> None:
    key = key_of(2)
    made = window(KEY_SHARED)
    feed(made, 1, [key])
    made.join(2, "c2", (), 0)
    assert feed(made, 1, [key]) == []
    made.leave(2, 0)
    assert feed_due(made, 0) == [(1, 1)], "although it has not answered"


def test_a_key_that_waits_holds_back_no_other() -> None:
    made = window(KEY_SHARED)
    feed(made, 2, ["a", "b"])
    made.nack(0, 100, 0)
    assert made.offer(2, "a", 0) == (Verdict.KEPT, None)
    assert made.offer(3, "b", 0) == (Verdict.SENT, 1)
    assert feed_due(made, 100) == [(0, 1), (2, 1)]


def test_a_full_consumer_holds_back_only_its_own_keys() -> None:
    made = window(KEY_SHARED, (1, 2), Policy(max_unacked_messages=2))
    one, two = key_of(1), key_of(2)
    assert feed(made, 5, [two, two, two, one, one]) == [(0, 2), (1, 2), (3, 1), (4, 1)]
    assert made.kept == 1
    made.ack(3, 4)
    assert made.due(0, 10) == [], "the room of another consumer"
    made.ack(1, 2)
    assert feed_due(made, 0) == [(2, 2)]


def test_kept_messages_are_bounded() -> None:
    made = window(KEY_SHARED, ())
    made.join(1, "c1", ("a",), 0)
    assert feed(made, SUBSCRIPTION_KEPT_MAX + 5, ["b"]) == []
    assert made.kept == made.next_offset == SUBSCRIPTION_KEPT_MAX
    assert not made.wants_new()
    made.join(2, "c2", (), 0)
    assert offsets(feed_due(made, 0)) == [*range(100)], "as many as it has room for"
    assert made.wants_new()


def test_a_key_goes_to_a_consumer_whose_filters_match_it() -> None:
    made = window(KEY_SHARED, ())
    made.join(1, "c1", ("eu-*", "us-?"), 0)
    made.join(2, "c2", ("asia-*",), 0)
    given = feed(made, 5, ["eu-1", "us-1", "asia-1", "us-10", "EU-1"])
    assert given == [(0, 1), (1, 1), (2, 2)]
    assert made.kept == 2, "nobody takes these"
    made.join(3, "c3", ("*",), 0)
    assert feed_due(made, 0) == [(3, 3), (4, 3)]


def test_filters_have_no_meaning_for_other_types() -> None:
    made = window(SHARED, ())
    made.join(1, "c1", ("a",), 0)
    assert feed(made, 1, ["b"]) == [(0, 1)]


def test_messages_without_a_key_take_turns_among_those_who_take_everything() -> None:
    made = window(KEY_SHARED, (1, 2))
    made.join(3, "c3", ("a*",), 0)
    made.join(4, "c4", ("*",), 0)
    assert [who for _, who in feed(made, 6)] == [1, 2, 4, 1, 2, 4]
    assert made.offer(6, "", 0) == (Verdict.SENT, 1), "an empty key is none"


def test_messages_without_a_key_have_no_order() -> None:
    made = window(KEY_SHARED)
    feed(made, 3)
    made.nack(0, 100, 0)
    made.nack(1, 10, 0)
    assert feed(made, 1) == [(3, 1)]
    assert feed_due(made, 10) == [(1, 1)]


def test_a_message_without_a_key_that_nobody_takes_is_kept() -> None:
    made = window(KEY_SHARED, ())
    made.join(1, "c1", ("a*",), 0)
    assert made.offer(0, None, 0) == (Verdict.KEPT, None)
    made.join(2, "c2", (), 0)
    assert feed_due(made, 0) == [(0, 2)]


def test_long_keys_keep_their_order_and_pass_filters_by() -> None:
    long = "k" * (KEY_CHARACTERS_MAX + 1)
    made = window(KEY_SHARED)
    made.join(2, "c2", ("k*",), 0)
    assert feed(made, 2, [long]) == [(0, 1), (1, 1)]
    made.nack(0, 10, 0)
    assert made.offer(2, long, 0) == (Verdict.KEPT, None)
    assert made.offer(3, long + "k", 0) == (Verdict.SENT, 1)


@pytest.mark.parametrize("filters", [("",), ("x" * 257,), ("x",) * 65])
def test_filters_out_of_range_are_refused(filters: tuple[str, ...]) -> None:
    made = window(KEY_SHARED, ())
    with pytest.raises(UsageError, match="key filter"):
        made.join(1, "c1", filters, 0)
    assert made.consumers == []
