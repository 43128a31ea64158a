"""What every subscription promises: positions, redelivery, poison, limits."""

from __future__ import annotations

import random

import pytest

from forebay.dispatch.policy import Policy, SubscriptionType
from forebay.dispatch.window import Verdict, Window
from forebay.errors import InvalidSetting, UsageError
from forebay.format.cursor import Cursor, decode_cursor_row, encode_cursor_row
from forebay.limits import (
    CURSOR_BYTES_MAX,
    NACK_DELAY_MS_MAX,
    SUBSCRIPTION_WAITING_MAX,
)
from support.subscriptions import feed, feed_due, offsets, window

EXCLUSIVE, SHARED = SubscriptionType.EXCLUSIVE, SubscriptionType.SHARED
FAILOVER, KEY_SHARED = SubscriptionType.FAILOVER, SubscriptionType.KEY_SHARED
ORDERED = (EXCLUSIVE, FAILOVER)

each_type = pytest.mark.parametrize("kind", SubscriptionType, ids=lambda kind: kind.name.lower())
ordered_types = pytest.mark.parametrize("kind", ORDERED, ids=lambda kind: kind.name.lower())


# ---- acknowledgements ----


@each_type
def test_the_position_never_passes_an_unacknowledged_message(kind: SubscriptionType) -> None:
    made = window(kind)
    feed(made, 5)
    assert made.ack(1, 5)
    assert made.position == 0
    assert made.cursor() == Cursor(0, ((1, 5),))
    assert made.ack(0, 1)
    assert made.position == made.next_offset == 5
    assert made.cursor() == Cursor(5)


@each_type
def test_a_second_acknowledgement_changes_nothing(kind: SubscriptionType) -> None:
    made = window(kind)
    feed(made, 3)
    assert made.ack(0, 2)
    assert not made.ack(0, 2)
    assert made.ack(0, 3)


def test_a_message_that_was_never_read_cannot_be_acknowledged() -> None:
    made = window(SHARED, cursor=Cursor(0, ((10, 12),)))
    feed(made, 3)
    for start, end in ((3, 4), (2, 4), (0, 13), (11, 13)):
        with pytest.raises(UsageError, match="not delivered"):
            made.ack(start, end)
    for start, end in ((2, 2), (-1, 1), (2, 1)):
        with pytest.raises(UsageError, match="not a range"):
            made.ack(start, end)
    assert made.outstanding == 3, "a call that is refused changes nothing"
    assert not made.ack(10, 12), "acknowledged before a restart"


def test_answers_from_before_a_restart_spare_a_delivery() -> None:
    made = window(SHARED, cursor=Cursor(10, ((14, 16),)))
    assert made.ack_unread(12, 13)
    assert made.ack_unread(13, 15)
    assert not made.ack_unread(12, 16)
    assert made.counters.skipped == 0
    assert made.cursor() == Cursor(10, ((12, 16),))
    assert offsets(feed(made, 3)) == [10, 11, 16]
    assert made.ack_unread(10, 18)
    assert made.next_offset == made.position == 18


def test_a_restart_reads_only_what_was_not_acknowledged() -> None:
    made = window(SHARED, policy=Policy(max_unacked_messages=100))
    feed(made, 10)
    made.ack(0, 2)
    made.ack(4, 6)
    made.ack(8, 9)
    again = window(SHARED, cursor=decode_cursor_row(encode_cursor_row(made.cursor()), "a cursor"))
    assert offsets(feed(again, 5)) == [2, 3, 6, 7, 9]
    again.ack(2, 4)
    assert again.cursor() == Cursor(6, ((8, 9),))


def test_a_cursor_keeps_the_fields_that_the_window_does_not_know() -> None:
    made = window(SHARED, cursor=Cursor(3, epoch=7, updated_ms=9, extra='{"x":1}'))
    assert made.cursor() == Cursor(3, epoch=7, updated_ms=9, extra='{"x":1}')


def test_what_does_not_fit_into_a_cursor_row_is_delivered_again_and_nothing_is_lost() -> None:
    count = 30_000
    made = window(SHARED, policy=Policy(max_unacked_messages=count))
    feed(made, count)
    acked = set(range(1, count, 2))
    for offset in random.Random(1).sample(sorted(acked), len(acked)):
        made.ack(offset, offset + 1)
    row = encode_cursor_row(made.cursor())
    assert len(row) <= CURSOR_BYTES_MAX
    again = window(
        SHARED, policy=Policy(max_unacked_messages=count), cursor=decode_cursor_row(row, "a row")
    )
    sent = set(offsets(feed(again, count)))
    assert set(range(count)) - acked <= sent, "what was not acknowledged comes again"
    assert sent & acked, "and some of what was"


@each_type
def test_offsets_without_messages_count_as_acknowledged(kind: SubscriptionType) -> None:
    made = window(kind, cursor=Cursor(0, ((20, 22),)))
    feed(made, 2)
    made.skip(1, 2**40)
    assert made.next_offset == 2**40
    assert made.cursor() == Cursor(0, ((1, 2**40),))
    assert made.counters.skipped == 2**40 - 1 - 2, "without those that were acknowledged"
    made.skip(2**40 + 5, 2**40 + 9)
    assert made.next_offset == 2**40
    assert made.cursor().ranges[-1] == (2**40 + 5, 2**40 + 9)
    assert made.ack(0, 1)
    assert made.position == 2**40


def test_a_message_above_the_next_one_cannot_be_offered() -> None:
    made = window(SHARED)
    with pytest.raises(UsageError, match="0 is the next one"):
        made.offer(1, None, 0)
    made.skip(0, 5)
    assert made.offer(3, None, 0) == (Verdict.DONE, None)


@each_type
def test_a_seek_forgets_what_was_sent(kind: SubscriptionType) -> None:
    made = window(kind, policy=Policy(max_unacked_messages=4))
    feed(made, 4)
    made.nack(1, 10, 0)
    made.seek(Cursor(2, ((3, 5),)))
    assert (made.outstanding, made.waiting, made.next_offset) == (0, 0, 2)
    assert made.next_time_ms() is None
    with pytest.raises(UsageError, match="not delivered"):
        made.ack(2, 3)
    assert not made.ack(1, 2)
    assert offsets(feed(made, 3)) == [2, 5, 6]
    assert made.due(10**6, 10) == []


# ---- who has room ----


@each_type
def test_a_consumer_has_no_more_unacknowledged_messages_than_the_policy_says(
    kind: SubscriptionType,
) -> None:
    made = window(kind, policy=Policy(max_unacked_messages=3))
    assert len(feed(made, 5)) == 3
    assert not made.wants_new()
    assert made.offer(3, None, 0) == (Verdict.FULL, None)
    made.ack(1, 2)
    assert made.wants_new()
    assert offsets(feed(made, 1)) == [3]


@each_type
def test_a_paused_consumer_gets_nothing(kind: SubscriptionType) -> None:
    made = window(kind)
    feed(made, 2)
    made.nack(0, 0, 0)
    made.pause(1)
    assert not made.wants_new()
    assert made.due(0, 10) == []
    made.resume(1)
    assert feed_due(made, 0) == [(0, 1)]
    assert made.wants_new()


@each_type
def test_nothing_is_wanted_without_consumers(kind: SubscriptionType) -> None:
    made = window(kind, consumers=())
    assert not made.wants_new()
    assert made.offer(0, "key", 0) == (Verdict.FULL, None)
    made.pause(1)
    made.leave(1, 0)


def test_messages_that_wait_are_bounded() -> None:
    made = window(SHARED)
    for offset in range(SUBSCRIPTION_WAITING_MAX):
        made.offer(offset, None, 0)
        made.nack(offset, 1000, 0)
    assert not made.wants_new()
    made.ack(0, 1)
    assert made.wants_new()


def test_what_a_window_keeps_does_not_grow_with_what_was_acknowledged() -> None:
    """A nack with a long delay leaves a timer, and a late answer removes its message."""
    made = window(SHARED)
    feed(made, 1)
    for offset in range(1, 5000):
        made.offer(offset, None, 0)
        made.nack(offset, NACK_DELAY_MS_MAX, 0)
        made.ack(offset, offset + 1)
    assert made.cursor() == Cursor(0, ((1, 5000),))
    assert made.waiting == 0


# ---- redelivery ----


@each_type
def test_what_a_consumer_had_is_due_at_once_and_in_order_when_it_leaves(
    kind: SubscriptionType,
) -> None:
    made = window(kind)
    feed(made, 4, keys="k")
    made.ack(1, 2)
    made.leave(1, 5)
    assert made.due(5, 10) == []
    made.join(2, "c2", (), 5)
    assert made.due(5, 10) == [0, 2, 3]
    assert feed_due(made, 5, limit=2) == [(0, 2), (2, 2)]
    assert feed_due(made, 5) == [(3, 2)]
    assert made.counters.redelivered == 3
    assert made.wants_new()


@each_type
def test_a_takeover_delivers_again_what_the_old_stream_had(kind: SubscriptionType) -> None:
    made = window(kind, policy=Policy(max_unacked_messages=2, max_redeliveries=0))
    feed(made, 2)
    made.pause(1)
    made.join(1, "c1", (), 1)
    assert feed_due(made, 1) == [(0, 1), (1, 1)], "it is not paused, and no attempt was counted"
    assert [each.unacked for each in made.consumers] == [2]


@each_type
def test_delays_double_up_to_their_maximum(kind: SubscriptionType) -> None:
    policy = Policy(redelivery_delay_ms=10, redelivery_delay_max_ms=50, ack_timeout_ms=None)
    made = window(kind, policy=policy)
    feed(made, 1)
    now = 0
    for delay in (10, 20, 40, 50, 50):
        made.nack(0, None, now)
        assert made.next_time_ms() == now + delay
        assert made.due(now + delay - 1, 1) == []
        now += delay
        assert feed_due(made, now) == [(0, 1)]
    made.nack(0, 7, now)
    assert made.next_time_ms() == now + 7, "the delay that a consumer asked for"


@each_type
def test_a_message_without_an_answer_times_out(kind: SubscriptionType) -> None:
    made = window(kind, policy=Policy(ack_timeout_ms=100, redelivery_delay_ms=10))
    feed(made, 1)
    feed(made, 1, now_ms=60)
    assert made.next_time_ms() == 100
    made.expire(99)
    assert made.outstanding == 2
    made.expire(100)
    assert (made.outstanding, made.counters.timed_out) == (1, 1)
    assert made.next_time_ms() == 110
    assert feed_due(made, 110) == [(0, 1)]
    assert made.next_time_ms() == 160
    made.ack(0, 2)
    made.expire(10**6)
    assert made.counters.timed_out == 1
    assert made.next_time_ms() is None


def test_without_a_timeout_a_message_waits_for_ever() -> None:
    made = window(SHARED, policy=Policy(ack_timeout_ms=None))
    feed(made, 1)
    made.expire(10**15)
    assert (made.outstanding, made.next_time_ms()) == (1, None)


@each_type
def test_a_late_answer_counts(kind: SubscriptionType) -> None:
    made = window(kind)
    feed(made, 2)
    made.nack(0, 50, 0)
    made.nack(0, 50, 0)
    assert made.counters.nacked == 1, "a second nack is ignored"
    assert made.ack(0, 1)
    assert made.offer(0, None, 60) == (Verdict.DONE, None)
    assert made.due(60, 10) == []
    assert made.position == 1


@each_type
def test_what_is_not_due_any_more_is_kept(kind: SubscriptionType) -> None:
    made = window(kind)
    feed(made, 2)
    made.nack(0, 50, 0)
    assert made.offer(0, None, 10) == (Verdict.KEPT, None), "too early"
    assert made.offer(1, None, 10) == (Verdict.KEPT, None), "at a consumer"


@pytest.mark.parametrize("delay_ms", [-1, NACK_DELAY_MS_MAX + 1, 2**64])
def test_a_delay_out_of_range_is_refused(delay_ms: int) -> None:
    made = window(SHARED)
    feed(made, 1)
    with pytest.raises(UsageError, match="delay"):
        made.nack(0, delay_ms, 0)
    assert made.outstanding == 1


def test_a_clock_that_goes_back_stands_still() -> None:
    made = window(SHARED, policy=Policy(ack_timeout_ms=10, redelivery_delay_ms=5))
    feed(made, 1, now_ms=100)
    feed(made, 1, now_ms=50)
    made.expire(109)
    assert made.outstanding == 2
    made.expire(110)
    assert made.outstanding == 0
    assert made.due(0, 10) == []
    assert made.due(115, 10) == [0, 1]


def test_a_policy_with_a_timeout_leaves_what_is_under_way_its_whole_time() -> None:
    made = window(SHARED, policy=Policy(ack_timeout_ms=None))
    feed(made, 2)
    made.configure(Policy(ack_timeout_ms=100), 500)
    feed(made, 1, now_ms=550)
    made.expire(599)
    assert made.counters.timed_out == 0
    assert made.next_time_ms() == 600
    made.expire(600)
    assert made.counters.timed_out == 2
    made.configure(Policy(ack_timeout_ms=None), 610)
    made.expire(10**6)
    assert made.outstanding == 1


def test_a_shorter_timeout_holds_for_all_messages() -> None:
    made = window(SHARED, policy=Policy(ack_timeout_ms=1000))
    feed(made, 1)
    made.configure(Policy(ack_timeout_ms=10), 0)
    feed(made, 1)
    assert made.next_time_ms() == 10
    made.expire(10)
    assert made.counters.timed_out == 2


def test_a_policy_with_less_room_takes_nothing_away() -> None:
    made = window(SHARED, policy=Policy(max_unacked_messages=3))
    feed(made, 3)
    made.configure(Policy(max_unacked_messages=1), 0)
    made.ack(0, 2)
    assert (made.outstanding, made.wants_new()) == (1, False)
    made.ack(2, 3)
    assert made.wants_new()


# ---- order ----


@ordered_types
def test_nothing_new_is_sent_while_a_message_waits(kind: SubscriptionType) -> None:
    made = window(kind)
    feed(made, 3)
    made.nack(1, 100, 0)
    assert not made.wants_new()
    assert made.offer(3, None, 0) == (Verdict.FULL, None)
    assert feed_due(made, 100) == [(1, 1)]
    assert feed(made, 1) == [(3, 1)], "a message that was sent again holds back nobody"


@ordered_types
def test_redeliveries_are_sent_in_the_order_of_their_offsets(kind: SubscriptionType) -> None:
    made = window(kind)
    feed(made, 4)
    made.nack(3, 10, 0)
    made.nack(0, 100, 0)
    made.nack(2, 50, 0)
    assert made.due(99, 10) == []
    assert made.offer(2, None, 99) == (Verdict.KEPT, None)
    assert made.due(100, 10) == [0, 2, 3]
    assert made.offer(2, None, 100) == (Verdict.KEPT, None)
    assert offsets(feed_due(made, 100)) == [0, 2, 3]


def test_a_message_that_waits_holds_back_nothing_of_a_shared_subscription() -> None:
    made = window(SHARED)
    feed(made, 3)
    made.nack(0, 100, 0)
    made.nack(2, 10, 0)
    assert made.wants_new()
    assert feed_due(made, 10) == [(2, 1)]


# ---- poison ----


def failing(kind: SubscriptionType, policy: Policy) -> Window:
    """Offset 0 failed as often as it may, and once more; 1 and 2 are at the consumer."""
    made = window(kind, policy=policy)
    feed(made, 3)
    for _ in range(2):
        made.nack(0, 0, 0)
        assert feed_due(made, 0) == [(0, 1)]
    made.nack(0, 0, 0)
    return made


@each_type
def test_a_dropped_message_is_acknowledged_and_counted(kind: SubscriptionType) -> None:
    made = failing(kind, Policy(max_redeliveries=2, poison="drop"))
    assert made.position == 1
    assert (made.counters.dropped, made.waiting) == (1, 0)
    assert made.wants_new()


@each_type
def test_a_blocked_message_stays_until_somebody_acknowledges_it(kind: SubscriptionType) -> None:
    made = failing(kind, Policy(max_redeliveries=2, poison="block"))
    assert made.blocked == [0]
    made.ack(1, 3)
    made.expire(10**9)
    assert made.due(10**9, 10) == []
    assert made.position == 0
    assert made.wants_new() == (kind not in ORDERED)
    assert made.ack(0, 1)
    assert (made.blocked, made.position, made.wants_new()) == ([], 3, True)


@each_type
def test_a_dead_letter_is_given_once_and_acknowledged_when_it_is_written(
    kind: SubscriptionType,
) -> None:
    made = failing(kind, Policy(max_redeliveries=2, poison="dead_letter"))
    assert made.poisoned() == [0]
    assert made.poisoned() == []
    assert made.position == 0
    assert made.wants_new() == (kind not in ORDERED)
    made.ack(0, 1)
    assert (made.position, made.counters.dead_letters, made.wants_new()) == (1, 1, True)


@each_type
def test_a_dead_letter_that_could_not_be_written_is_given_again_later(
    kind: SubscriptionType,
) -> None:
    policy = Policy(
        max_redeliveries=2, poison="dead_letter", ack_timeout_ms=None, redelivery_delay_ms=10
    )
    made = failing(kind, policy)
    made.unpoison(0, 0)
    now = 0
    for delay in (10, 20, 40):
        assert made.poisoned() == [0]
        made.unpoison(0, now)
        assert made.next_time_ms() == now + delay
        made.expire(now + delay - 1)
        assert made.poisoned() == []
        now += delay
        made.expire(now)
    assert made.poisoned() == [0]
    assert made.counters.dead_letters == 0


def test_a_dead_letter_that_was_acknowledged_late_is_not_written() -> None:
    made = failing(SHARED, Policy(max_redeliveries=2, poison="dead_letter"))
    made.ack(0, 1)
    assert made.poisoned() == []
    assert made.counters.dead_letters == 0


# ---- policies ----


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_unacked_messages": 0},
        {"ack_timeout_ms": 0},
        {"redelivery_delay_ms": -1},
        {"redelivery_delay_ms": 10, "redelivery_delay_max_ms": 9},
        {"max_redeliveries": -1},
        {"poison": "explode"},
    ],
    ids=str,
)
def test_a_policy_that_makes_no_sense_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidSetting, match=next(reversed(wrong))):
        Policy(**wrong)  # type: ignore[arg-type]


def test_the_numbers_of_subscription_types_are_those_of_danube() -> None:
    assert [each.name for each in sorted(SubscriptionType)] == [
        "EXCLUSIVE",
        "SHARED",
        "FAILOVER",
        "KEY_SHARED",
    ]
    assert [*map(int, sorted(SubscriptionType))] == [0, 1, 2, 3]
