"""An object is replaced only if it is damaged, and only by the bytes of its descriptor."""

from __future__ import annotations

from pathlib import Path

import pytest

from forebay.errors import CorruptLog
from forebay.files.local import LocalDisk
from forebay.format.frame import encode_frame
from forebay.format.names import object_key
from forebay.repair.apply import Copies, rewrite_object
from forebay.repair.frames import FrameRun, FrameSlice
from forebay.repair.plan import ObjectRewrite
from support.tiered_stores import TOPIC, Setup, fill, resources_of

KEY = object_key(TOPIC, "data-0-9.dnb1")


class Frames:
    """Frames in memory, as a repair reads them from a segment."""

    name = "frames"

    def __init__(self, data: bytes) -> None:
        self._data = data

    def size(self) -> int:
        return len(self._data)

    def read_into(self, buffer: memoryview, position: int) -> int:
        some = self._data[position : position + len(buffer)]
        buffer[: len(some)] = some
        return len(some)

    def close(self) -> None: ...


def rewritten(setup: Setup, data: bytes, tmp_path: Path) -> Copies:
    """Carries out the plan to write the first object again from these frames."""
    [descriptor] = setup.descriptors()
    run = FrameRun(Frames(data), 0, 10, 0, len(data))
    copies = Copies(LocalDisk(), tmp_path / "copies", 0)
    with setup.store() as store:
        wanted = ObjectRewrite(descriptor, (FrameSlice(run, 0, 10),))
        rewrite_object(resources_of(store), TOPIC, wanted, copies)
    return copies


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    setup = Setup(tmp_path / "data")
    with setup.topic() as topic:
        fill(topic, 10)
        topic.upload()
    return setup


def stored(setup: Setup) -> bytes:
    return bytes(setup.objects.get_object(KEY, 1 << 20))


def test_a_sound_object_is_not_written_again(setup: Setup, tmp_path: Path) -> None:
    """Somebody may have repaired it after the plan was made."""
    before, etag = stored(setup), setup.objects.head(KEY).etag
    copies = rewritten(setup, before, tmp_path)
    assert (stored(setup), setup.objects.head(KEY).etag, copies.count) == (before, etag, 0)


@pytest.mark.parametrize("damage", ["missing", "changed", "cut"])
def test_a_damaged_object_is_replaced_by_the_bytes_of_its_descriptor(
    setup: Setup, tmp_path: Path, damage: str
) -> None:
    before = stored(setup)
    damaged = {"changed": before[:-1] + b"?", "cut": before[:-1]}.get(damage)
    setup.objects.delete_object(KEY)
    if damaged is not None:
        setup.objects.put_object(KEY, damaged)
    rewritten(setup, before, tmp_path)
    assert stored(setup) == before


def test_other_frames_than_those_of_the_descriptor_are_not_written(
    setup: Setup, tmp_path: Path
) -> None:
    """They have the right offsets and sizes; the hash tells that they are another log's."""
    before = stored(setup)
    [descriptor] = setup.descriptors()
    payload = len(before) // 10 - 16
    other = b"".join(encode_frame(offset, b"x" * payload) for offset in range(10))
    assert len(other) == descriptor.size
    setup.objects.put_object(KEY, damaged := before[:-1] + b"?")
    with pytest.raises(CorruptLog, match="is not written again"):
        rewritten(setup, other, tmp_path)
    assert stored(setup) == damaged
