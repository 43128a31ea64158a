"""Objects that are not those of their descriptors: the hash decides whether they are read."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from forebay.errors import CorruptFrame, DescriptorError, ForeignObject
from forebay.format.content import ContentHash
from forebay.format.descriptor import ObjectDescriptor
from forebay.format.frame import encode_frame
from forebay.format.message import MessageId, StreamMessage, encode_message
from forebay.limits import KIB
from forebay.read import object_stream
from forebay.read.fetch_pool import FetchPool
from forebay.read.object_stream import ObjectStream
from forebay.read.verify import examine_object
from forebay.settings import CloudReaderSettings
from support.stored_objects import TOPIC, HookedStore, StoredTopic, drained, stream_of

COUNT = 20
CHUNK = 64 * KIB


@pytest.fixture(autouse=True)
def nothing_proven() -> Iterator[None]:
    object_stream._proven.clear()
    yield
    object_stream._proven.clear()


def encoded(topic: str, offset: int) -> bytes:
    message = StreamMessage(b"from %-20s" % topic.encode(), msg_id=MessageId(1, topic))
    return encode_message(message, offset)


def stored() -> tuple[StoredTopic, ObjectDescriptor]:
    """Two objects with descriptors as the uploader makes them."""
    topic = StoredTopic()
    for start in (0, COUNT):
        made = topic.add(start, [encoded(str(TOPIC), start + at) for at in range(COUNT)], every=5)
        content = ContentHash()
        content.add(topic.data(made))
        etag = topic.store.head(topic.key(made)).etag
        topic.rename(made, etag=etag, content_hash=content.value)
    return topic, topic.named[0]


def foreign(topic: StoredTopic, mine: ObjectDescriptor, name: str = "/default/others") -> bytes:
    """An object of another topic, of the same range and size."""
    frames = [encode_frame(at, encoded(name, at)) for at in range(COUNT)]
    data = b"".join(frames)
    assert len(data) == mine.size
    topic.store.put_object(topic.key(mine), data)
    return data


@pytest.mark.parametrize("start", [0, 7, COUNT - 1])
@pytest.mark.parametrize("lenient", [False, True])
def test_another_topics_object_of_the_same_range_and_size_is_not_read(
    pool: FetchPool, start: int, lenient: bool
) -> None:
    topic, mine = stored()
    foreign(topic, mine)
    found: list[tuple[int, bytes]] = []
    with pytest.raises(ForeignObject, match=r"sha256:.*sha256:") as raised:
        drained(stream_of(topic, pool, start, chunk_bytes=200, lenient=lenient), found=found)
    assert mine.content_hash is not None
    assert mine.content_hash in str(raised.value)
    assert topic.key(mine) in str(raised.value)
    assert found == []


def test_an_object_that_is_replaced_while_it_is_read_is_not_read_on(pool: FetchPool) -> None:
    topic, mine = stored()
    stream = stream_of(topic, pool, chunk_bytes=200, ahead=0)
    first = stream.next()
    assert first is not None
    foreign(topic, mine)
    with pytest.raises(ForeignObject):
        drained(stream)


def test_a_copy_with_another_etag_is_read_whole_once_and_then_as_before(pool: FetchPool) -> None:
    topic, mine = stored()
    topic.store.put_object(topic.key(mine), bytes(topic.data(mine)))
    store = HookedStore(topic.store, lambda *_: None)
    for whole in (1, 0):
        store.requests.clear()
        stream = stream_of(topic, pool, 19, 20, chunk_bytes=10_000, ahead=0, store=store)
        assert [offset for offset, _ in drained(stream)] == [19]
        of_all = [each for each in store.requests if each[1:] == (0, mine.size)]
        assert len(of_all) == whole


def test_a_descriptor_without_a_hash_is_read_as_before(pool: FetchPool) -> None:
    topic, mine = stored()
    topic.rename(mine, content_hash=None)
    foreign(topic, mine)
    assert len(drained(stream_of(topic, pool))) == 2 * COUNT


def test_a_damaged_object_is_read_as_far_as_it_is_valid(pool: FetchPool) -> None:
    topic, mine = stored()
    topic.overwrite(mine, mine.size - 1, b"?")
    found: list[tuple[int, bytes]] = []
    with pytest.raises(CorruptFrame) as raised:
        drained(stream_of(topic, pool, chunk_bytes=200), found=found)
    assert raised.value.offset == COUNT - 1
    assert len(found) == COUNT - 1


def test_another_topics_object_that_is_damaged_too_is_not_read(pool: FetchPool) -> None:
    topic, mine = stored()
    data = bytearray(foreign(topic, mine))
    data[-1] ^= 1
    topic.store.put_object(topic.key(mine), bytes(data))
    with pytest.raises(CorruptFrame):
        drained(stream_of(topic, pool, lenient=True))


@pytest.mark.parametrize("form", [{"codec": "lz4"}, {"format": "pulsar"}])
def test_an_object_of_an_unknown_form_is_refused(pool: FetchPool, form: dict[str, str]) -> None:
    topic, mine = stored()
    other = topic.rename(mine, **form)
    with pytest.raises(DescriptorError, match="later one"):
        drained(stream_of(topic, pool))
    with pytest.raises(DescriptorError, match="later one"):
        examine_object(topic.store, pool, CloudReaderSettings(), TOPIC, other)
    topic.rename(other, codec=None, format="dnb1")
    assert len(drained(stream_of(topic, pool))) == 2 * COUNT


@pytest.mark.parametrize("ahead", [0, 4])
def test_a_closed_stream_stops_comparing(pool: FetchPool, ahead: int) -> None:
    topic = StoredTopic()
    made = topic.add(0, [encoded(str(TOPIC), at) * 500 for at in range(40)], every=None)
    topic.rename(made, etag="another", content_hash=f"sha256:{'0' * 64}")

    def close(_key: str, start: int, end: int) -> None:
        if end - start == CHUNK and start > 0:
            stream.close()

    store = HookedStore(topic.store, close)
    settings = CloudReaderSettings(fetch_chunk_size=CHUNK, read_ahead_chunks=ahead)
    stream = ObjectStream(TOPIC, store, topic, pool, settings, 0, chunk_bytes=100)
    assert stream.next() is None
    assert stream.closed
    assert len(store.requests) < made.size // CHUNK
