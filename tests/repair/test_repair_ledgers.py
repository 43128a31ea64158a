"""Ledgers are repaired from the log, and the log from ledgers, as with objects of frames."""

from __future__ import annotations

from pathlib import Path

import pytest

from forebay.format.names import is_ledger
from forebay.limits import KIB
from forebay.repair.repair import repair
from forebay.settings import StoreSettings, UploaderSettings, WalSettings
from forebay.topic.store import Store

UPLOADED, COUNT = 60, 100


def settings_of(data: Path) -> StoreSettings:
    return StoreSettings(
        data=data,
        wal=WalSettings(rotate_max_bytes=2000),
        uploader=UploaderSettings(
            enabled=False, format="pulsar", ledger_block_bytes=KIB, index_every_messages=10
        ),
    )


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Segments of 20 messages; the first 60 are in a ledger too."""
    with Store(settings_of(tmp_path)) as store:
        topic = store.topic("orders")
        for first in range(0, COUNT, 10):
            if first == UPLOADED:
                topic.upload()
            batch = [b"%d" % offset for offset in range(first, first + 10)]
            topic.append_many(batch, durability="synced")
    return tmp_path


def ledger(data: Path) -> Path:
    objects = data / "objects/storage/topics/default/orders/objects"
    [found] = [each for each in objects.iterdir() if is_ledger(each.name)]
    return found


def index(data: Path) -> Path:
    return ledger(data).with_name(ledger(data).name + "-index")


def segment(data: Path, name: str = "wal.log") -> Path:
    return data / "wal/default/orders" / name


def flip(path: Path, position: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[position] ^= 4
    path.write_bytes(raw)


def mend_and_read(data: Path) -> None:
    assert repair(settings_of(data)).findings
    assert repair(settings_of(data), apply=True).left == []
    assert repair(settings_of(data)).findings == []
    with Store(settings_of(data)) as store:
        found = [(each.offset, each.payload) for each in store.topic("orders").read(0, end=COUNT)]
    assert found == [(offset, b"%d" % offset) for offset in range(COUNT)]


@pytest.mark.parametrize("position", [0, 130, 300, 1024, 2000, -1])
def test_a_damaged_ledger_is_written_again_byte_for_byte(data: Path, position: int) -> None:
    before = ledger(data).read_bytes(), index(data).read_bytes()
    flip(ledger(data), position)
    mend_and_read(data)
    assert (ledger(data).read_bytes(), index(data).read_bytes()) == before


@pytest.mark.parametrize("damage", ["missing", "damaged"])
def test_the_index_object_of_a_ledger_is_written_again(data: Path, damage: str) -> None:
    path, before = index(data), index(data).read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        flip(path, 3)
    mend_and_read(data)
    assert path.read_bytes() == before


def test_a_segment_is_written_again_from_a_ledger(data: Path) -> None:
    before = segment(data).read_bytes()
    flip(segment(data), 300)
    mend_and_read(data)
    assert segment(data).read_bytes() == before


def test_a_segment_and_a_ledger_put_each_other_right(data: Path) -> None:
    before = segment(data, "wal.1.log").read_bytes(), ledger(data).read_bytes()
    flip(segment(data, "wal.1.log"), 300)
    flip(ledger(data), 300)
    mend_and_read(data)
    assert (segment(data, "wal.1.log").read_bytes(), ledger(data).read_bytes()) == before
