"""A broker that acknowledges buffered messages delivers them at once, and skips none that stays."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

import pytest

from forebay.catalog.cursors import read_cursors
from forebay.dispatch.policy import SubscriptionType
from forebay.errors import LogStopped
from forebay.testing import Fault
from support.dispatching import TOPIC, Dispatching, dispatching, eventually, settled
from support.faulty_dispatch import faulty_dispatching


async def append(found: Dispatching, *payloads: bytes, sync: bool = False) -> None:
    topic = await asyncio.to_thread(found.store.topic, str(TOPIC))
    await topic.append_many_async(payloads, durability="synced" if sync else "buffered")


def synced_offset(found: Dispatching) -> int:
    return found.store.topic(str(TOPIC)).synced_offset


async def test_a_message_is_delivered_before_it_is_synced() -> None:
    async with faulty_dispatching(ack="buffered") as found:
        await append(found, b"a", sync=True)
        consumer = await found.consumer()
        assert await consumer.take(1) == [b"a"]
        await settled(consumer.subscription)
        await append(found, b"b")
        assert await consumer.take(1) == [b"b"]
        assert synced_offset(found) == 1


async def test_a_broker_that_acknowledges_synced_messages_delivers_no_others() -> None:
    async with faulty_dispatching(ack="synced") as found:
        await append(found, b"a", sync=True)
        consumer = await found.consumer()
        assert await consumer.take(1) == [b"a"]
        await append(found, b"b")
        await consumer.take(1)
        assert synced_offset(found) == 2


async def test_what_is_not_synced_is_acknowledged_in_the_catalog_only_afterwards() -> None:
    async with faulty_dispatching(ack="buffered") as found:
        await append(found, b"a", sync=True)
        consumer = await found.consumer()
        await append(found, b"b", b"c")
        assert await consumer.take(3) == [b"a", b"b", b"c"]
        consumer.subscription.ack(0, 3)
        consumer.subscription.save()
        storage = await asyncio.to_thread(found.store.storage, str(TOPIC))
        assert storage.subscription_cursor("s1").position == 1, "only that is synced"
        await append(found, b"d", sync=True)
        await eventually(lambda: storage.subscription_cursor("s1").position == 3)


async def test_a_stop_keeps_what_was_acknowledged_before_it_was_synced(tmp_path: Path) -> None:
    async with dispatching(tmp_path, ack="buffered", subscription_start="earliest") as found:
        await append(found, b"a", b"b")
        consumer = await found.consumer()
        assert await consumer.take(2) == [b"a", b"b"]
        consumer.subscription.ack(0, 2)
    async with dispatching(tmp_path, ack="buffered") as found:
        catalog = found.store.catalog
        assert catalog is not None
        positions = [cursor.position for _, cursor in read_cursors(catalog, TOPIC)]
        assert positions == [2]


@pytest.mark.parametrize("acknowledged", [False, True])
@pytest.mark.parametrize("kind", SubscriptionType)
async def test_messages_that_got_the_offsets_of_lost_ones_are_delivered(
    kind: SubscriptionType, *, acknowledged: bool
) -> None:
    """A disk error takes back what consumers have; producers go on before consumers notice."""
    async with faulty_dispatching(ack="buffered") as found:
        await append(found, b"a", sync=True)
        consumer = await found.consumer(kind=kind)
        await append(found, b"lost 1", b"lost 2")
        assert await consumer.take(3) == [b"a", b"lost 1", b"lost 2"]
        if acknowledged:
            consumer.subscription.ack(0, 3)
        await settled(consumer.subscription)
        found.disk.inject(Fault("append", errno.EIO, path="wal.log"))
        with pytest.raises(LogStopped):
            await append(found, b"lost 3", sync=True)
        kept = [b"%d" % number for number in range(5)]
        await append(found, *kept, sync=True)
        topic = found.store.topic(str(TOPIC))
        stored = [each.payload for each in topic.read(follow=False)]
        assert stored == [b"a", *kept]
        got: list[bytes] = []
        while kept[-1] not in got:
            got += await consumer.take(1)
        assert [each for each in got if each in kept] == kept
