"""A store on a disk that fails: stopped topics are opened again, and the others are not harmed."""

from __future__ import annotations

import errno

import pytest

from forebay.errors import LogStopped
from forebay.testing import CrashDisk, Fault, FaultDisk
from support.tiered_stores import store_on


def test_asking_the_store_for_a_stopped_topic_opens_it_again() -> None:
    crash = CrashDisk()
    faults = FaultDisk(crash)
    with store_on(faults) as store:
        topic, other = store.topic("t"), store.topic("other")
        topic.append(b"one", durability="synced")
        faults.inject(Fault("sync", errno.EIO, "wal.log"))
        with pytest.raises(LogStopped):
            topic.append(b"two", durability="synced")
        with pytest.raises(LogStopped):
            topic.append(b"three")
        assert other.append(b"untouched", durability="synced") == 0
        again = store.topic("t")
        found = [message.payload for message in again.read()]
        assert found in ([b"one"], [b"one", b"two"])
        assert again.append(b"four", durability="synced") == len(found)
        assert store.topic("t").append(b"five") == len(found) + 1


def test_a_topic_whose_disk_is_still_broken_can_be_asked_for_again_later() -> None:
    crash = CrashDisk()
    faults = FaultDisk(crash)
    with store_on(faults) as store:
        topic = store.topic("t")
        topic.append(b"one", durability="synced")
        faults.inject(Fault("any", errno.EIO, "/t/", times=None))
        with pytest.raises(LogStopped):
            topic.append(b"two", durability="synced")
        for _ in range(2):
            with pytest.raises(OSError, match="Input/output"):
                store.topic("t")
        faults.clear()
        assert next(iter(store.topic("t").read())).payload == b"one"


def test_closing_a_store_with_a_stopped_topic_closes_the_others_and_says_so() -> None:
    crash = CrashDisk()
    faults = FaultDisk(crash)
    store = store_on(faults)
    store.topic("bad").append(b"x", durability="synced")
    store.topic("good").append(b"y")
    faults.inject(Fault("sync", errno.EIO, "/bad/wal.log"))
    store.topic("bad").append(b"lost")
    with pytest.raises(LogStopped):
        store.close()
    crash.crash()
    with store_on(faults) as again:
        assert [m.payload for m in again.topic("good").read()] == [b"y"]
