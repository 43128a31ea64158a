"""What an upload and a read cost: bytes and requests, counted where they arrive.

A proxy in front of a real S3 server counts requests and bytes, so that nothing the client does by
itself is missed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from forebay.catalog.chain import stored
from forebay.format.descriptor import ObjectDescriptor
from forebay.limits import GIB, KIB, MIB
from forebay.settings import MetadataSettings, StoreSettings, UploaderSettings
from forebay.topic.store import Store, Topic
from support.proxy import ProxyProcess
from support.s3_server import S3Server
from support.storages import storage_of
from support.tiers import NAME, TierSettings

pytestmark = pytest.mark.timeout(300)

GB = 10**9
PART = 64 * MIB


@dataclass
class Counted:
    """A store in S3 behind a proxy that counts."""

    proxy: ProxyProcess
    tiers: TierSettings

    def open(self, uploader: UploaderSettings) -> Store:
        return self.tiers.open(uploader=uploader)

    def bytes_down(self) -> int:
        return self.proxy.stats().bytes_down


@pytest.fixture
def counted(s3: S3Server, tmp_path: Path) -> Iterator[Counted]:
    with ProxyProcess(s3.endpoint.removeprefix("http://"), http=True) as proxy:
        cloud = s3.settings(options={"endpoint": proxy.url})
        yield Counted(proxy, TierSettings(tmp_path / "data", cloud, MetadataSettings()))


def fill(topic: Topic, mib: int, payload_bytes: int) -> int:
    """Appends so many MiB of payloads; returns the bytes of the log."""
    payload = bytes(range(256)) * (payload_bytes // 256)
    for _ in range(mib):
        topic.append_many([payload] * (MIB // payload_bytes))
    topic.flush()
    return sum(segment.size for segment in topic.segments())


def require_cheap_upload(counted: Counted, mib: int) -> None:
    """At most 1.02 times the logical bytes, and 20 PUTs for each GB with parts of 64 MiB."""
    with counted.open(UploaderSettings(enabled=False, stream_chunk_size=PART)) as store:
        topic = store.topic(NAME)
        logical = fill(topic, mib, 16 * KIB)
        before = counted.proxy.stats()
        [done] = topic.upload()
        after = counted.proxy.stats()
    assert done.size == logical
    puts = after.requests["PUT"] - before.requests.get("PUT", 0)
    parts = -(-logical // PART)
    assert puts == parts + 1, "a PUT for each part, and one for the copy of the descriptor"
    assert -(-GB // PART) + 1 <= 20
    assert puts / max(logical / GB, 1) <= 20
    sent = after.bytes_up - before.bytes_up
    print(f"{logical} bytes: {puts} PUTs, {sent / logical:.5f} times the bytes")
    assert logical < sent <= 1.02 * logical


def test_an_upload_sends_little_more_than_the_log_in_few_requests(counted: Counted) -> None:
    require_cheap_upload(counted, 160)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_an_upload_of_a_gib_sends_little_more_than_the_log(counted: Counted) -> None:
    require_cheap_upload(counted, 1016)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("cap", [100 * MIB, GIB])
def test_both_writers_upload_a_gib_into_the_same_objects_in_one_cycle(
    tmp_path: Path, cap: int
) -> None:
    names = []
    for rolling in (False, True):
        uploader = UploaderSettings(enabled=False, rolling=rolling, max_object_bytes=cap)
        with Store(StoreSettings(tmp_path / str(rolling), uploader=uploader)) as store:
            topic = store.topic(NAME)
            logical = fill(topic, 1016, KIB)
            began = time.monotonic()
            storage_of(topic).upload_due()
            seconds = time.monotonic() - began
            with store.view() as view:
                names.append([each.object_id for each in view.topic(NAME).objects()])
        made = f"{len(names[-1])} objects in {seconds:.1f} s"
        print(f"{logical} bytes, cap {cap}, rolling {rolling}: {made}")
    assert names[0] == names[1]
    assert len(names[0]) == logical // cap


# ---- reading ----


def index_interval(descriptor: ObjectDescriptor) -> int:
    """The most bytes between two entries of the object's index."""
    assert descriptor.offset_index is not None
    positions = [position for _, position in descriptor.offset_index]
    return max(end - start for start, end in pairwise([0, *positions, descriptor.size]))


@pytest.mark.parametrize("payload_bytes", [256, 16 * KIB])
def test_reads_of_objects_fetch_little_more_than_they_use(
    counted: Counted, payload_bytes: int
) -> None:
    with counted.open(UploaderSettings(enabled=False)) as store:
        topic = store.topic(NAME)
        fill(topic, 64, payload_bytes)
        [done] = topic.upload()
        topic.rotate()
        topic.append(b"the last segment stays", durability="synced")
        topic.trim_local()
        middle = done.count // 2 + 7
        before = counted.bytes_down()
        messages = list(topic.read(middle, end=middle + 1000))
        some = counted.bytes_down() - before
        before = counted.bytes_down()
        assert sum(1 for _ in topic.read(0, end=done.next_offset)) == done.count
        whole = counted.bytes_down() - before
    assert [message.offset for message in messages] == list(range(middle, middle + 1000))
    used = done.size * 1000 // done.count  # all messages are of one size, but for their numbers
    print(f"1000 messages: {some} for {used}; whole: {whole / done.size:.5f} times the bytes")
    assert some <= used + 2 * index_interval(stored(done)) + 64 * KIB
    assert done.size <= whole <= 1.05 * done.size
