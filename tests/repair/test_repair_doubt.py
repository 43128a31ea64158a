"""A repair changes nothing on a guess.

It must know which log it has, which frames are the topic's, and that the log opens afterwards.
"""

from __future__ import annotations

import errno
import itertools
import random
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from forebay.catalog.catalog import Catalog
from forebay.catalog.sqlite import SqliteKv
from forebay.errors import CorruptLog, ForebayError
from forebay.files.local import LocalDisk
from forebay.format.frame import HEADER_BYTES, scan
from forebay.format.names import SegmentNames, parse_topic
from forebay.objects.memory import MemoryBackend
from forebay.objects.store import CloudStore
from forebay.repair.apply import Copies, LocalRepair
from forebay.repair.frames import cover
from forebay.repair.plan import Kind, LocalPlan, Rewrite
from forebay.repair.repair import RepairReport, repair
from forebay.repair.survey import survey_log
from forebay.settings import (
    CloudSettings,
    MetadataSettings,
    StoreSettings,
    UploaderSettings,
    WalSettings,
)
from forebay.testing import CrashDisk, Fault, FaultDisk, ManualClock
from forebay.topic.resources import StoreResources
from forebay.topic.store import Store
from forebay.wal.checkpoints import Publisher

COUNT = 100
LOG = Path("wal/default/orders")


def settings_of(data: Path | str, rotate: int = 2000) -> StoreSettings:
    return StoreSettings(
        data=Path(data),
        wal=WalSettings(rotate_max_bytes=rotate),
        uploader=UploaderSettings(enabled=False),
    )


def fill(store: Store, uploaded: int | None) -> None:
    topic = store.topic("orders")
    for first in range(0, COUNT, 10):
        if first == uploaded:
            topic.upload()
        topic.append_many([b"%d" % each for each in range(first, first + 10)], durability="synced")


def write(data: Path, uploaded: int | None = None) -> StoreSettings:
    """Segments of 20 messages, the last one active."""
    settings = settings_of(data)
    with Store(settings) as store:
        fill(store, uploaded)
    return settings


def contents(folder: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in folder.iterdir() if each.suffix != ".synced"}


def read_from(settings: StoreSettings, first: int = 0) -> list[bytes]:
    with Store(settings) as store:
        return [each.payload for each in store.topic("orders").read(first)]


def numbers(first: int = 0) -> list[bytes]:
    return [b"%d" % each for each in range(first, COUNT)]


# ---- which log it is -----------------------------------------------------------------------------


def machine(root: Path, name: str) -> StoreSettings:
    """One of two machines that share a catalog and a bucket."""
    return StoreSettings(
        data=root / name,
        cloud=CloudSettings(backend="fs", root=str(root / "bucket")),
        metadata=MetadataSettings(path=root / "catalog.db"),
        uploader=UploaderSettings(enabled=False),
    )


@pytest.mark.parametrize("lost", [("wal.id",), ("wal.id", "wal.id.copy")], ids=["id", "both"])
def test_a_log_never_gets_the_id_of_one_that_is_elsewhere(
    tmp_path: Path, lost: tuple[str, ...]
) -> None:
    """Otherwise its owner would reuse offsets that were acknowledged there."""
    here, there = machine(tmp_path, "here"), machine(tmp_path, "there")
    with Store(here) as store:
        topic = store.topic("orders")
        topic.append_many([b"here"] * 100, durability="synced")
        topic.upload()
    with Store(there) as store:
        acknowledged = store.topic("orders").append_many([b"there"] * 50, durability="synced")
        assert acknowledged == range(100, 150)
    for name in lost:
        (tmp_path / "here" / LOG / name).unlink()
    catalog_id = (tmp_path / "there" / LOG / "wal.id").read_text()
    done = repair(here, apply=True, accept_loss=True)
    (finding,) = done.findings
    assert finding.kind is Kind.LOG_ID
    assert finding.repaired == (len(lost) == 1)
    own = tmp_path / "here" / LOG / "wal.id"
    assert not own.exists() or own.read_text() != catalog_id
    with Store(here) as store:
        assert store.topic("orders").append(b"next", durability="synced") >= 150


@pytest.mark.parametrize("damage", ["missing", "damaged", "another"])
def test_an_id_that_nothing_here_tells_is_left_and_said_what_that_means(
    tmp_path: Path, damage: str
) -> None:
    settings = write(tmp_path, uploaded=60)
    path = tmp_path / LOG / "wal.id"
    log_id = path.read_text()
    (tmp_path / LOG / "wal.id.copy").unlink()
    if damage == "missing":
        path.unlink()
    else:
        path.write_text("f" * 32 if damage == "another" else "no id")
    before = contents(tmp_path / LOG)
    for apply in (False, True):
        (finding,) = repair(settings, apply=apply, accept_loss=apply).left
        assert not finding.fixable
        assert "40 messages of it, 60 to 99, are in no object" in finding.what
        assert log_id in finding.remedy
    assert contents(tmp_path / LOG) == before
    path.write_text(log_id)  # as it says
    assert repair(settings).findings == []
    assert read_from(settings) == numbers()


def test_one_flipped_bit_in_the_id_costs_nothing(tmp_path: Path) -> None:
    settings = write(tmp_path, uploaded=60)
    path = tmp_path / LOG / "wal.id"
    digits = path.read_text()
    path.write_text(("1" if digits[0] == "0" else "0") + digits[1:])
    with pytest.raises(CorruptLog, match="`forebay repair`"):
        read_from(settings)
    (finding,) = repair(settings, apply=True).findings
    assert (finding.kind, finding.repaired) == (Kind.LOG_ID, True)
    assert path.read_text() == digits
    assert read_from(settings) == numbers()


# ---- whether it opens ----------------------------------------------------------------------------


@pytest.mark.parametrize("gone", [True, False], ids=["missing", "empty"])
def test_a_log_without_its_beginning_and_checkpoint_begins_later(
    tmp_path: Path, gone: bool
) -> None:
    settings = write(tmp_path, uploaded=60)
    if gone:
        (tmp_path / LOG / "wal.ckpt").unlink()
    else:
        (tmp_path / LOG / "wal.ckpt").write_bytes(b"")
    (tmp_path / LOG / "wal.log").unlink()
    assert repair(settings, apply=True).left == []
    assert repair(settings).findings == []
    assert read_from(settings) == numbers()


def test_a_beginning_that_is_nowhere_is_lost_only_with_leave(tmp_path: Path) -> None:
    settings = write(tmp_path)
    (tmp_path / LOG / "wal.ckpt").unlink()
    (tmp_path / LOG / "wal.log").unlink()
    before = contents(tmp_path / LOG)
    left = repair(settings, apply=True).left
    assert Kind.LOSS in {each.kind for each in left}
    assert contents(tmp_path / LOG) == before
    assert repair(settings, apply=True, accept_loss=True).left == []
    assert repair(settings).findings == []
    assert read_from(settings, 20) == numbers(20)


@pytest.mark.parametrize("fill_byte", [b"\0", b"\x5a"], ids=["zeros", "junk"])
@pytest.mark.parametrize("memories", [True, False], ids=["", "without memories"])
def test_a_newest_segment_of_zeros_or_junk_is_put_right_so_that_the_log_opens(
    tmp_path: Path, fill_byte: bytes, memories: bool
) -> None:
    settings = write(tmp_path)
    path = tmp_path / LOG / "wal.4.log"
    path.write_bytes(fill_byte * path.stat().st_size)
    if not memories:
        (tmp_path / LOG / "wal.ckpt").unlink()
        (tmp_path / LOG / "wal.synced").unlink()
    assert repair(settings, apply=True, accept_loss=True).left == []
    assert repair(settings).findings == []
    with Store(settings) as store:
        topic = store.topic("orders")
        # Without the memories the catalog still knows how many messages were there.
        assert topic.append(b"next", durability="synced") == COUNT
        assert topic.read(79, end=80).__next__().payload == b"79"


@pytest.mark.parametrize("gone", [("wal.synced",), ("wal.synced", "wal.ckpt")])
def test_offsets_of_a_newest_segment_that_nobody_remembers_are_not_used_again(
    tmp_path: Path, gone: tuple[str, ...]
) -> None:
    """The file holds frames of another position, so it is not torn but overwritten."""
    settings = write(tmp_path)
    folder = tmp_path / LOG
    (folder / "wal.4.log").write_bytes((folder / "wal.2.log").read_bytes())
    for name in gone:
        (folder / name).unlink()
    left = repair(settings, apply=True).left
    (loss,) = [each for each in left if each.kind is Kind.LOSS]
    assert "offsets 80 to 99 are nowhere else" in loss.what
    assert repair(settings, apply=True, accept_loss=True).left == []
    assert repair(settings).findings == []
    with Store(settings) as store:
        topic = store.topic("orders")
        assert [each.payload for each in topic.read(0, end=80)] == numbers()[:80]
        assert topic.append(b"next", durability="synced") >= COUNT


def test_a_torn_first_frame_of_the_newest_segment_is_no_damage(tmp_path: Path) -> None:
    settings = write(tmp_path)
    with Store(settings) as store:
        store.topic("orders").rotate()
    (tmp_path / LOG / "wal.5.log").write_bytes(b"\x64\0\0\0\0\0\0\0torn")
    assert repair(settings).findings == []
    assert read_from(settings) == numbers()


def test_a_plan_whose_log_would_not_open_is_seen_before_anything_is_changed(tmp_path: Path) -> None:
    write(tmp_path)
    disk, folder = LocalDisk(), tmp_path / LOG
    before = contents(folder)
    survey = survey_log(disk, folder, SegmentNames(), "/default/orders")
    target = survey.targets()[-1]
    pieces, _ = cover(target.first, target.end, survey.runs)
    rewrites = [Rewrite(target, tuple(pieces))]
    wrong = LocalPlan(replace(survey, end=COUNT + 5), survey.targets(), rewrites, checkpoints=True)
    right = LocalPlan(survey, survey.targets(), rewrites, checkpoints=True)
    with closing(Publisher(disk, folder)) as publisher:
        for plan, opens in ((wrong, False), (right, True)):
            copies = Copies(disk, tmp_path, 0)
            work = LocalRepair(disk, parse_topic("orders"), plan, publisher, copies)
            why = work.stage()
            assert (why is None) == opens
            assert opens or "everything before offset 105 was synced" in str(why)
            work.discard()
            assert contents(folder) == before


# ---- whose frames they are -----------------------------------------------------------------------


def frames_of(path: Path) -> list[bytes]:
    found = scan(path.read_bytes())
    raw = path.read_bytes()
    return [
        raw[position - HEADER_BYTES : position + length]
        for position, length in zip(found.positions, found.lengths, strict=True)
    ]


def nested(tmp_path: Path, *, uploaded: bool) -> tuple[StoreSettings, Path]:
    """Message 50 holds other frames 51 to 58 of the same topic, and its length is damaged."""
    with Store(settings_of(tmp_path / "other", 1 << 20)) as store:
        batch = [b"FALSE%d" % each for each in range(60)]
        store.topic("orders").append_many(batch, durability="synced")
    payload = b"".join(frames_of(tmp_path / "other" / LOG / "wal.log")[51:59])
    settings = settings_of(tmp_path / "data", 1 << 20)
    with Store(settings) as store:
        batch = [payload if each == 50 else b"true%d" % each for each in range(COUNT)]
        topic = store.topic("orders")
        topic.append_many(batch, durability="synced")
        if uploaded:
            topic.upload()
    path = tmp_path / "data" / LOG / "wal.log"
    raw = bytearray(path.read_bytes())
    raw[sum(map(len, frames_of(path)[:50])) + 8] ^= 1
    path.write_bytes(raw)
    return settings, path


def test_frames_in_a_payload_never_take_the_place_of_messages_that_are_there(
    tmp_path: Path,
) -> None:
    settings, path = nested(tmp_path, uploaded=False)
    before = path.read_bytes()
    done = repair(settings, apply=True, accept_loss=True)
    assert any("two different versions of offsets 51 to 58" in each.what for each in done.left)
    assert path.read_bytes() == before


def test_where_an_object_tells_frames_in_a_payload_do_not_matter(tmp_path: Path) -> None:
    settings, _ = nested(tmp_path, uploaded=True)
    assert repair(settings, apply=True).left == []
    found = read_from(settings)
    assert found[51:] == [b"true%d" % each for each in range(51, COUNT)]


# ---- interrupted ---------------------------------------------------------------------------------


def swap_on(disk: CrashDisk, one: str, other: str) -> None:
    paths = [Path("/data") / LOG / name for name in (one, "swapped", other)]
    for source, target in ((0, 1), (2, 0), (1, 2)):
        disk.replace(paths[source], paths[target])
    disk.sync_dir(paths[0].parent)


def test_segments_that_hold_each_others_frames_survive_a_power_loss_at_any_call() -> None:
    settings = settings_of("/data")
    for call in itertools.count(0, 2):
        clock = ManualClock()
        power = CrashDisk(clock)
        faults = FaultDisk(power)
        catalog, objects = Catalog(SqliteKv(None), clock=clock), CloudStore(MemoryBackend())

        def opened(
            disk: FaultDisk = faults,
            clock: ManualClock = clock,
            catalog: Catalog = catalog,
            objects: CloudStore = objects,
        ) -> Store:
            return Store(settings, disk=disk, clock=clock, catalog=catalog, store=objects)

        def mend(
            disk: FaultDisk = faults,
            clock: ManualClock = clock,
            catalog: Catalog = catalog,
            objects: CloudStore = objects,
        ) -> RepairReport:
            resources = StoreResources(settings, clock, catalog=catalog, store=objects)
            try:
                return repair(settings, apply=True, disk=disk, clock=clock, resources=resources)
            finally:
                resources.close()

        with opened() as store:
            fill(store, None)
        swap_on(power, "wal.1.log", "wal.3.log")
        faults.inject(Fault("any", errno.EIO, skip=call, times=None))
        ended = attempt(mend)
        faults.clear()
        power.crash(random.Random(call))
        assert mend().left == [], f"at call {call}"
        with opened() as store:
            found = [each.payload for each in store.topic("orders").read(0)]
            assert found == numbers(), f"at call {call}"
        if ended:
            assert call > 30
            return


def attempt(mend: Callable[[], RepairReport]) -> bool:
    """Whether the repair was completed."""
    try:
        mend()
    except (ForebayError, OSError):
        return False
    return True
