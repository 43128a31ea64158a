"""A non-reliable topic passes each message to one consumer of every subscription, or drops it."""

from __future__ import annotations

import pytest

from forebay.dispatch import metrics
from forebay.dispatch.fanout import FanoutTopic
from forebay.dispatch.policy import SubscriptionType
from forebay.dispatch.subscription import Consumer
from forebay.errors import SubscriptionBusy
from forebay.limits import OUTBOX_BYTES_MAX
from support.dispatching import payload_of


def consumer(number: int, *filters: str) -> Consumer:
    return Consumer(number, f"c{number}", filters, payload_of)


async def taken(found: Consumer) -> list[bytes]:
    found.end()  # so that it does not wait
    return await found.take()


async def test_every_subscription_gets_a_message_once() -> None:
    topic = FanoutTopic("/default/t")
    one, two, other = consumer(1), consumer(2), consumer(3)
    for each in (one, two):
        topic.subscription("a", SubscriptionType.SHARED).join(each)
    topic.subscription("b", SubscriptionType.EXCLUSIVE).join(other)
    for number in range(4):
        assert topic.publish(b"%d" % number, None) == 2
    assert sorted([*await taken(one), *await taken(two)]) == [b"0", b"1", b"2", b"3"]
    assert await taken(other) == [b"0", b"1", b"2", b"3"]


async def test_consumers_of_a_shared_subscription_take_turns() -> None:
    topic = FanoutTopic("/default/t")
    found = [consumer(number) for number in range(3)]
    for each in found:
        topic.subscription("a", SubscriptionType.SHARED).join(each)
    for number in range(9):
        topic.publish(b"%d" % number, None)
    assert [len(await taken(each)) for each in found] == [3, 3, 3]


async def test_a_key_goes_to_one_consumer() -> None:
    topic = FanoutTopic("/default/t")
    found = [consumer(number) for number in range(3)]
    for each in found:
        topic.subscription("a", SubscriptionType.KEY_SHARED).join(each)
    for number in range(60):
        topic.publish(b"%d" % (number % 6), f"key-{number % 6}")
    got = [set(await taken(each)) for each in found]
    assert sum(len(each) for each in got) == 6, "no key is in two places"


async def test_a_filter_chooses_keys() -> None:
    topic = FanoutTopic("/default/t")
    europe = consumer(1, "eu-*")
    topic.subscription("a", SubscriptionType.KEY_SHARED).join(europe)
    assert topic.publish(b"1", "eu-west") == 1
    assert topic.publish(b"2", "us-east") == 0
    assert await taken(europe) == [b"1"]


async def test_the_first_consumer_of_a_failover_gets_all_until_it_leaves() -> None:
    topic = FanoutTopic("/default/t")
    first, second = consumer(1), consumer(2)
    subscription = topic.subscription("a", SubscriptionType.FAILOVER)
    subscription.join(first)
    subscription.join(second)
    topic.publish(b"1", None)
    assert await taken(first) == [b"1"]
    subscription.leave(first)
    topic.publish(b"2", None)
    assert await taken(second) == [b"2"]


async def test_what_nobody_can_take_is_dropped_and_counted() -> None:
    topic = FanoutTopic("/default/dropped")
    before = metrics.DROPPED.value("/default/dropped")
    assert topic.publish(b"nobody", None) == 0
    slow = consumer(1)
    topic.subscription("a", SubscriptionType.SHARED).join(slow)
    assert topic.publish(b"x" * OUTBOX_BYTES_MAX, None) == 1
    assert topic.publish(b"full", None) == 0
    assert metrics.DROPPED.value("/default/dropped") - before == 2


async def test_the_type_of_a_subscription_in_use_stays() -> None:
    topic = FanoutTopic("/default/t")
    one = consumer(1)
    topic.subscription("a", SubscriptionType.SHARED).join(one)
    with pytest.raises(SubscriptionBusy, match="is shared and in use"):
        topic.subscription("a", SubscriptionType.EXCLUSIVE)
    topic.subscription("a", SubscriptionType.SHARED).leave(one)
    assert topic.subscription("a", SubscriptionType.EXCLUSIVE).kind is SubscriptionType.EXCLUSIVE
