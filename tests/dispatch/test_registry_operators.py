"""Operators move subscriptions while consumers use them, and see what they do."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from forebay.dispatch import metrics
from forebay.dispatch.gauges import SubscriptionGauges
from forebay.dispatch.policy import SubscriptionType
from forebay.dispatch.registry import Registry
from forebay.dispatch.report import live_subscriptions
from forebay.errors import SubscriptionBusy
from forebay.metrics import render
from forebay.topic.subscription_facts import SubscriptionFacts
from support.dispatching import TOPIC, Dispatching, dispatching

EXCLUSIVE = SubscriptionType.EXCLUSIVE
LABELS = ("/default/orders", "s1")


async def append(found: Dispatching, count: int) -> None:
    topic = await asyncio.to_thread(found.store.topic, str(TOPIC))
    await topic.append_many_async([b"x"] * count, durability="synced")


async def facts(registry: Registry) -> SubscriptionFacts:
    loaded = registry.loaded(TOPIC)
    assert loaded is not None
    (found,) = await asyncio.to_thread(live_subscriptions, registry.lags, loaded, None)
    return found


async def test_skipping_what_blocks_sets_the_subscription_going_again(tmp_path: Path) -> None:
    async with dispatching(
        tmp_path, subscription_start="earliest", max_redeliveries=0, max_unacked_messages=2
    ) as found:
        await append(found, 4)
        consumer = await found.consumer(kind=EXCLUSIVE)
        await consumer.take(2)
        consumer.subscription.nack(0, None)
        await consumer.idle()
        seen = await facts(found.registry)
        assert (seen.blocked, seen.waiting, seen.nacked) == ((0,), 1, 1)
        assert seen.problem == "the message at offset 0 failed too often: skip it, or seek"
        assert await found.registry.skip(TOPIC, "s1", "blocked") == (1, 1)
        assert await consumer.take(1) == [b"x"]
        seen = await facts(found.registry)
        assert (seen.blocked, seen.problem, seen.skipped) == ((), None, 1)


async def test_acknowledgements_during_a_skip_count(tmp_path: Path) -> None:
    async with dispatching(tmp_path, subscription_start="earliest") as found:
        await append(found, 10)
        consumer = await found.consumer()
        await consumer.take(10)
        skipping = asyncio.create_task(found.registry.skip(TOPIC, "s1", 3))
        await asyncio.sleep(0)  # it computes now what to skip
        consumer.subscription.ack(7, 9)
        assert await skipping == (3, 3)
        assert consumer.subscription.window.cursor().ranges == ((7, 9),)


async def test_a_skip_goes_past_what_was_acknowledged_before(tmp_path: Path) -> None:
    async with dispatching(tmp_path, subscription_start="earliest") as found:
        await append(found, 10)
        consumer = await found.consumer()
        await consumer.take(10)
        consumer.subscription.ack(1, 4)
        assert await found.registry.skip(TOPIC, "s1", 2) == (5, 2)
    async with dispatching(tmp_path) as found:
        assert (await found.registry.find(TOPIC, "s1")).window.position == 5


async def test_a_subscription_is_created_before_anybody_consumes(tmp_path: Path) -> None:
    async with dispatching(tmp_path) as found:
        await append(found, 5)
        assert await found.registry.create(TOPIC, "s1", EXCLUSIVE, 2) == (2, True)
        assert await found.registry.create(TOPIC, "s1", EXCLUSIVE, 4) == (2, False)
        with pytest.raises(SubscriptionBusy):
            await found.registry.create(TOPIC, "s1", SubscriptionType.SHARED)
        consumer = await found.consumer(kind=EXCLUSIVE)
        assert len(await consumer.take(3)) == 3


async def test_the_metrics_tell_the_lag_of_a_subscription_in_use(tmp_path: Path) -> None:
    async with dispatching(tmp_path, subscription_start="earliest") as found:
        gauges = SubscriptionGauges(found.store, found.registry)
        await append(found, 10)
        consumer = await found.consumer()
        await consumer.take(10)
        consumer.subscription.ack(0, 4)
        await asyncio.to_thread(render)
        assert metrics.LAG.value(*LABELS) == 6
        assert metrics.OUTSTANDING.value(*LABELS) == 6
        assert metrics.LAG_BYTES.value(*LABELS) > 0
        assert LABELS in metrics.LAG_SECONDS.values()
        assert metrics.FAILING.value(*LABELS) == 0
        del gauges


async def test_the_metrics_tell_the_lag_of_a_subscription_that_nobody_uses(tmp_path: Path) -> None:
    async with dispatching(tmp_path) as found:
        await append(found, 5)
        await found.registry.create(TOPIC, "s1", EXCLUSIVE, 1)
    async with dispatching(tmp_path) as found:
        gauges = SubscriptionGauges(found.store, found.registry)
        await append(found, 5)
        assert found.registry.loaded(TOPIC) is None
        await asyncio.to_thread(render)
        assert metrics.LAG.value(*LABELS) == 9
        assert metrics.CONSUMERS.values()[LABELS] == 0
        del gauges
