"""Reading back committed objects corrects what their descriptors say: index, hash and etag."""

from __future__ import annotations

import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from forebay.catalog.catalog import Change
from forebay.catalog.ownership import Session
from forebay.catalog.sqlite import SqliteKv
from forebay.errors import CorruptLog
from forebay.format.descriptor import ObjectDescriptor, decode_descriptor, encode_descriptor
from forebay.format.names import object_key, sidecar
from forebay.settings import MetadataSettings, WalSettings
from forebay.upload import metrics
from forebay.upload.restore import RestoreChoices, restore_topic
from support.tiered_stores import TOPIC, Setup, fill, offsets

COUNT = 2500


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    setup = Setup(tmp_path / "data", wal=WalSettings())
    with setup.topic() as topic:
        fill(topic, COUNT)
        topic.upload()
    return setup


def sidecar_of(descriptor: ObjectDescriptor) -> str:
    return object_key(TOPIC, sidecar(descriptor.object_id))


def misplaced(descriptor: ObjectDescriptor) -> ObjectDescriptor:
    """An index whose second entry names the middle of a frame."""
    first, second, *rest = descriptor.offset_index or ()
    return replace(descriptor, offset_index=(first, (second[0], second[1] + 3), *rest))


def lose_catalog(setup: Setup) -> Setup:
    """The same objects with an empty catalog, restored without the log."""
    assert setup.data is not None
    shutil.rmtree(setup.data)
    other = replace(setup, kv=SqliteKv(None))
    with closing(Session(other.catalog, MetadataSettings(), other.clock)) as session:
        restore_topic(other.catalog, other.objects, session, TOPIC, RestoreChoices())
    return other


def test_a_wrong_index_in_a_sidecar_is_corrected_after_a_restore(setup: Setup) -> None:
    [made] = setup.descriptors()
    wrong = misplaced(made)
    setup.objects.put_object(sidecar_of(made), encode_descriptor(wrong))
    restored = lose_catalog(setup)
    assert restored.descriptors() == [wrong]
    before = metrics.descriptors_corrected.value("index")
    with restored.topic() as topic:
        assert offsets(topic.read(1500, end=1600)) == list(range(1500, 1600))
        topic.upload()
        record = restored.catalog.record(TOPIC)
        assert record is not None
        assert record.verified == record.tail >= COUNT
    assert restored.descriptors() == [made]
    assert metrics.descriptors_corrected.value("index") == before + 1
    beside = restored.objects.get_object(sidecar_of(made), 10**6)
    assert decode_descriptor(bytes(beside)) == made


def unverified(setup: Setup, *, content_hash: str | None, etag: str | None) -> ObjectDescriptor:
    """Gives the object another descriptor, which was not read back yet."""
    [made] = setup.descriptors()
    other = replace(made, content_hash=content_hash, highest_publish_time=None, etag=etag)
    assert setup.catalog.replace_descriptor(TOPIC, made, other)
    setup.catalog.update(TOPIC, None, lambda record: Change(replace(record, verified=0)))
    return made


@pytest.mark.parametrize("etag", ["another", None])
def test_a_descriptor_of_an_earlier_release_gets_its_hash_when_the_object_is_read(
    setup: Setup, etag: str | None
) -> None:
    made = unverified(setup, content_hash=None, etag=etag)
    with setup.topic() as topic:
        topic.upload()
    assert setup.descriptors() == [made]


def test_an_object_of_another_content_gets_nothing_corrected(setup: Setup) -> None:
    said = f"sha256:{'0' * 64}"
    unverified(setup, content_hash=said, etag=None)
    with setup.topic() as topic, pytest.raises(CorruptLog, match=said):
        topic.upload()
    assert setup.descriptors()[0].content_hash == said
    record = setup.catalog.record(TOPIC)
    assert record is not None
    assert record.verified == 0
