"""Reading an object back: what passes, and what is reported of what does not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from forebay.errors import (
    CorruptFrame,
    CorruptLog,
    ForeignObject,
    LogClosed,
    MissingData,
    ServiceUnavailable,
)
from forebay.format.content import ContentHash
from forebay.format.frame import HEADER_BYTES, encode_frame
from forebay.format.layout import Buffer
from forebay.format.message import MessageId, StreamMessage, encode_message
from forebay.limits import KIB
from forebay.objects.memory import MemoryBackend
from forebay.objects.store import CloudStore
from forebay.read.fetch_pool import FetchPool
from forebay.read.metrics import FOREIGN_NAMES
from forebay.read.verify import Examined, FaultKind, examine_object, looks_same, verify_object
from forebay.settings import CloudReaderSettings
from support.stored_objects import TOPIC, StoredTopic, payload

CHUNK = 64 * KIB
SETTINGS = CloudReaderSettings(fetch_chunk_size=CHUNK)
MESSAGES = 300
SIZE = 1000
"""Of a payload: five chunks, cut inside frames."""
FRAME = HEADER_BYTES + SIZE


class Objects(MemoryBackend):
    """Objects that change, or a store that fails, after so many requests."""

    def __init__(self) -> None:
        super().__init__()
        self.requests = 0
        self.fail_at: int | None = None
        self.vanish_at: int | None = None

    def get_range(self, key: str, start: int, end: int, *, etag: str | None = None) -> Buffer:
        self.requests += 1
        if self.requests == self.fail_at:
            raise ServiceUnavailable("no answer")
        if self.requests == self.vanish_at:
            self.delete_object(key)
        return super().get_range(key, start, end, etag=etag)


class Setup:
    def __init__(self, pool: FetchPool | None) -> None:
        self.pool = pool
        self.backend = Objects()
        self.topic = StoredTopic(self.backend)
        payloads = [payload(offset, SIZE) for offset in range(10, 10 + MESSAGES)]
        self.descriptor = self.topic.add(10, payloads, every=100)

    def examine(self) -> Examined:
        return examine_object(CloudStore(self.backend), self.pool, SETTINGS, TOPIC, self.descriptor)


@pytest.fixture(params=["ahead", "in turn"])
def setup(request: pytest.FixtureRequest) -> Iterator[Setup]:
    pool = FetchPool(2) if request.param == "ahead" else None
    yield Setup(pool)
    if pool is not None:
        pool.close()


def test_what_is_right_is_read_once_and_counted(setup: Setup) -> None:
    seen = setup.examine()
    assert (seen.bytes, seen.messages, seen.same_etag) == (MESSAGES * FRAME, MESSAGES, True)
    assert (seen.fault, seen.found, seen.raw_bytes) == (None, None, MESSAGES * FRAME)
    assert seen.content_hash is not None
    assert setup.backend.requests == -(-MESSAGES * FRAME // CHUNK)


@pytest.mark.parametrize("frame", [0, 1, 64, 65, 150, MESSAGES - 1])
def test_a_damaged_frame_is_told_with_its_place(setup: Setup, frame: int) -> None:
    setup.topic.overwrite(setup.descriptor, frame * FRAME + HEADER_BYTES + 3, b"?")
    found = setup.examine()
    assert (found.bytes, found.messages) == (frame * FRAME, frame)
    assert found.fault is not None
    assert found.fault.kind is FaultKind.CORRUPT
    assert (found.fault.position, found.fault.offset) == (frame * FRAME, 10 + frame)
    assert isinstance(found.fault.error, CorruptFrame)
    with pytest.raises(CorruptFrame, match=f"position {frame * FRAME} "):
        verify_object(CloudStore(setup.backend), setup.pool, SETTINGS, TOPIC, setup.descriptor)


def test_fewer_messages_than_the_descriptor_says_are_damage(setup: Setup) -> None:
    setup.descriptor = setup.topic.rename(setup.descriptor, end_offset=10 + MESSAGES)
    fault = setup.examine().fault
    assert fault is not None
    assert "should have offset" in str(fault.error)


def test_an_index_that_misleads_is_told(setup: Setup) -> None:
    wrong = ((10, 0), (110, 100 * FRAME), (210, 200 * FRAME + 1))
    setup.descriptor = setup.topic.rename(setup.descriptor, offset_index=wrong)
    fault = setup.examine().fault
    assert fault is not None
    assert (fault.kind, fault.position, fault.offset) == (FaultKind.INDEX, 200 * FRAME, 210)
    assert "index says" in str(fault.error)


def test_the_right_index_is_found_if_only_the_index_is_wrong(setup: Setup) -> None:
    right = setup.descriptor.offset_index
    wrong = ((10, 0), (110, 100 * FRAME - 5), (210, 200 * FRAME + 1))
    setup.descriptor = setup.topic.rename(setup.descriptor, offset_index=wrong)
    seen = setup.examine()
    assert seen.fault is not None
    assert seen.fault.offset == 110
    assert seen.found == replace(setup.descriptor, offset_index=right)
    assert (seen.bytes, seen.messages) == (MESSAGES * FRAME, MESSAGES)


def hashed(setup: Setup) -> None:
    content = ContentHash()
    content.add(setup.topic.data(setup.descriptor))
    setup.descriptor = setup.topic.rename(setup.descriptor, content_hash=content.value)


def test_valid_frames_of_another_content_are_a_fault_of_its_own(setup: Setup) -> None:
    hashed(setup)
    assert setup.examine().fault is None
    frames = [encode_frame(at, payload(at + 1, SIZE)) for at in range(10, 10 + MESSAGES)]
    setup.backend.put_object(setup.topic.key(setup.descriptor), b"".join(frames))
    seen = setup.examine()
    assert seen.fault is not None
    assert seen.fault.kind is FaultKind.CONTENT
    assert isinstance(seen.fault.error, ForeignObject)
    assert str(setup.descriptor.content_hash) in str(seen.fault.error)
    assert seen.found is None


def test_a_wrong_index_does_not_hide_another_content(setup: Setup) -> None:
    hashed(setup)
    wrong = ((10, 0), (110, 100 * FRAME - 5))
    other = f"sha256:{'0' * 64}"
    setup.descriptor = replace(setup.descriptor, offset_index=wrong, content_hash=other)
    fault = setup.examine().fault
    assert fault is not None
    assert fault.kind is FaultKind.CONTENT


def test_a_copy_with_the_right_hash_shows_its_etag(setup: Setup) -> None:
    hashed(setup)
    setup.descriptor = replace(setup.descriptor, etag="of the first store")
    seen = setup.examine()
    assert (seen.fault, seen.same_etag) == (None, False)
    now = setup.backend.head(setup.topic.key(setup.descriptor)).etag
    assert seen.found == replace(setup.descriptor, etag=now)


def test_a_message_that_names_another_topic_is_told_and_the_hash_decides(
    setup: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    def told(offset: int, topic: str) -> bytes:
        return encode_message(StreamMessage(b"x", msg_id=MessageId(1, topic)), offset)

    names = [str(TOPIC), "/default/others", str(TOPIC)]
    made = setup.topic.add(1000, [told(1000 + at, name) for at, name in enumerate(names)])
    setup.descriptor = made
    before = FOREIGN_NAMES.value()
    assert setup.examine().fault is None
    hashed(setup)
    assert setup.examine().fault is None
    assert FOREIGN_NAMES.value() == before + 2
    assert "names another topic" in caplog.text
    assert "offset=1001" in caplog.text


def test_a_missing_or_resized_object_is_told_without_reading(setup: Setup) -> None:
    setup.descriptor = setup.topic.rename(setup.descriptor, size=setup.descriptor.size + 1)
    fault = setup.examine().fault
    assert fault is not None
    assert fault.kind is FaultKind.RESIZED
    with pytest.raises(CorruptLog, match=str(setup.descriptor.size)):
        looks_same(CloudStore(setup.backend), TOPIC, setup.descriptor)
    setup.topic.delete(setup.descriptor)
    fault = setup.examine().fault
    assert fault is not None
    assert (fault.kind, type(fault.error)) == (FaultKind.MISSING, MissingData)
    assert setup.backend.requests == 0


def test_an_object_that_goes_away_meanwhile_is_missing(setup: Setup) -> None:
    setup.backend.vanish_at = 3
    fault = setup.examine().fault
    assert fault is not None
    assert fault.kind is FaultKind.MISSING
    assert "was deleted while it was read" in str(fault.error)


def test_a_store_that_does_not_answer_is_no_damage(setup: Setup) -> None:
    setup.backend.fail_at = 2
    with pytest.raises(ServiceUnavailable):
        setup.examine()
    assert setup.examine().fault is None


def test_a_pool_that_was_closed_ends_the_reading() -> None:
    pool = FetchPool(1)
    pool.close()
    with pytest.raises(LogClosed):
        Setup(pool).examine()


def test_another_etag_is_told_and_is_no_fault(setup: Setup) -> None:
    setup.descriptor = setup.topic.rename(setup.descriptor, etag="another")
    found = setup.examine()
    assert (found.same_etag, found.fault) == (False, None)
