"""A damaged store is repaired where that is possible; what is not possible is reported."""

from __future__ import annotations

import errno
import itertools
import random
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from forebay.catalog.catalog import Catalog
from forebay.catalog.sqlite import SqliteKv
from forebay.client.address import ServerInfo, server_file
from forebay.errors import CorruptFrame, ForebayError, LogLocked, UnknownTopic, UsageError
from forebay.files.disk import Disk
from forebay.files.local import LocalDisk
from forebay.format.frame import encode_frame, scan
from forebay.format.names import parse_topic
from forebay.objects.memory import MemoryBackend
from forebay.objects.store import CloudStore
from forebay.repair.plan import Kind
from forebay.repair.repair import RepairReport, repair
from forebay.settings import (
    StoreSettings,
    UploaderSettings,
    WalSettings,
)
from forebay.testing import (
    CrashDisk,
    Fault,
    FaultBackend,
    FaultDisk,
    FaultKv,
    ManualClock,
    ObjectFault,
)
from forebay.topic.resources import StoreResources
from forebay.topic.store import Store
from forebay.topic.view import StoreView
from forebay.wal.identity import write_log_id
from support.served import served

UPLOADED = 60
COUNT = 100
LOG = Path("wal/default/orders")
OBJECT = Path("objects/storage/topics/default/orders/objects/data-0-59.dnb1")


def settings_of(data: Path | str) -> StoreSettings:
    return StoreSettings(
        data=Path(data),
        wal=WalSettings(rotate_max_bytes=2000),
        uploader=UploaderSettings(enabled=False),
    )


def payload(offset: int) -> bytes:
    return b"%d" % offset


def fill(store: Store, *, uploaded: int = UPLOADED, count: int = COUNT) -> None:
    topic = store.topic("orders")
    for first in range(0, count, 10):
        if first == uploaded:
            topic.upload()
        batch = [payload(offset) for offset in range(first, first + 10)]
        topic.append_many(batch, durability="synced")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Segments of 20 messages, the last one active; the first 60 messages are in an object too."""
    data = tmp_path_factory.mktemp("model") / "data"
    with Store(settings_of(data)) as store:
        fill(store)
    return data


@pytest.fixture
def data(model: Path, tmp_path: Path) -> Path:
    shutil.copytree(model, tmp_path / "data")
    return tmp_path / "data"


def contents(data: Path) -> dict[str, bytes]:
    """The files of the log and the objects."""
    return {
        str(path.relative_to(data)): path.read_bytes()
        for folder in (data / LOG, (data / OBJECT).parent)
        for path in sorted(folder.iterdir())
        if path.suffix != ".synced"
    }


def read_all(store: Store, lost: tuple[int, ...] = ()) -> None:
    """Every message but the lost ones is there, with its own payload, through both tiers."""
    topic = store.topic("orders")
    start, found = 0, []
    for end in (*lost, None):
        found += [(each.offset, each.payload) for each in topic.read(start, end=end)]
        start = 0 if end is None else end + 1
    wanted = [offset for offset in range(COUNT) if offset not in lost]
    assert found == [(offset, payload(offset)) for offset in wanted]


def mend(data: Path, *, accept_loss: bool = False) -> RepairReport:
    return repair(settings_of(data), apply=True, accept_loss=accept_loss)


def flip(path: Path, position: int, bits: int = 4) -> Path:
    raw = bytearray(path.read_bytes())
    raw[position] ^= bits
    path.write_bytes(raw)
    return path


def cut(path: Path, size: int) -> None:
    with path.open("r+b") as file:
        file.truncate(size)


def remove(data: Path, *names: str) -> None:
    for name in names:
        (data / LOG / name).unlink()


def insert(path: Path, position: int, raw: bytes) -> None:
    before = path.read_bytes()
    path.write_bytes(before[:position] + raw + before[position:])


def swap(one: Path, other: Path) -> None:
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


def test_a_sound_store_has_no_findings(data: Path) -> None:
    before = contents(data)
    assert repair(settings_of(data)).findings == []
    assert mend(data).findings == []
    assert contents(data) == before
    assert not (data / "repair").exists()


DAMAGES: dict[str, tuple[Kind, Callable[[Path], object]]] = {
    "a flipped bit in the first frame": (Kind.SEGMENT, lambda d: flip(d / LOG / "wal.log", 20)),
    "a flipped length": (Kind.SEGMENT, lambda d: flip(d / LOG / "wal.1.log", 1100 + 9)),
    "a flipped offset": (Kind.SEGMENT, lambda d: flip(d / LOG / "wal.1.log", 0)),
    "a flipped bit in the last frame": (Kind.SEGMENT, lambda d: flip(d / LOG / "wal.2.log", 2170)),
    "a segment cut short": (Kind.SEGMENT, lambda d: cut(d / LOG / "wal.1.log", 1000)),
    "an empty segment": (Kind.SEGMENT, lambda d: cut(d / LOG / "wal.1.log", 0)),
    "a segment in the middle is gone": (Kind.SEGMENT, lambda d: remove(d, "wal.1.log")),
    "two segments are gone": (Kind.SEGMENT, lambda d: remove(d, "wal.1.log", "wal.2.log")),
    "the oldest segment is gone": (Kind.SEGMENT, lambda d: remove(d, "wal.log")),
    "strange bytes between frames": (
        Kind.SEGMENT,
        lambda d: insert(d / LOG / "wal.log", 500, b"strange"),
    ),
    "strange bytes behind a sealed segment": (
        Kind.SEGMENT,
        lambda d: insert(d / LOG / "wal.log", 2170, b"strange"),
    ),
    "zeros in the place of a segment": (
        Kind.SEGMENT,
        lambda d: (d / LOG / "wal.log").write_bytes(bytes(2170)),
    ),
    "a damaged index": (Kind.INDEX, lambda d: flip(d / LOG / "wal.1.idx", 30)),
    "a missing index": (Kind.INDEX, lambda d: remove(d, "wal.idx")),
    "a damaged log id": (Kind.LOG_ID, lambda d: flip(d / LOG / "wal.id", 3, 0x80)),
    "a missing log id": (Kind.LOG_ID, lambda d: remove(d, "wal.id")),
    "a log id of another log": (
        Kind.LOG_ID,
        lambda d: (d / LOG / "wal.id").write_text("0" * 32),
    ),
    "a damaged copy of the log id": (Kind.LOG_ID, lambda d: flip(d / LOG / "wal.id.copy", 3)),
    "two segments under each other's names": (
        Kind.SEGMENT,
        lambda d: swap(d / LOG / "wal.1.log", d / LOG / "wal.3.log"),
    ),
    "a flipped bit in an object": (Kind.OBJECT, lambda d: flip(d / OBJECT, 3000)),
    "an object cut short": (Kind.OBJECT, lambda d: cut(d / OBJECT, 3000)),
    "a missing object": (Kind.OBJECT, lambda d: (d / OBJECT).unlink()),
    "a damaged sidecar": (Kind.SIDECAR, lambda d: flip(d / f"{OBJECT}.json", 30, 0x80)),
    "a missing sidecar": (Kind.SIDECAR, lambda d: (d / f"{OBJECT}.json").unlink()),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_still_somewhere_is_put_back_byte_for_byte(damage: str, data: Path) -> None:
    kind, spoil = DAMAGES[damage]
    sound = contents(data)
    spoil(data)
    damaged = contents(data)
    looked = repair(settings_of(data))
    assert {each.kind for each in looked.findings} - {Kind.INDEX} <= {kind}
    assert looked.findings
    assert contents(data) == damaged, "a look changes nothing"
    done = mend(data)
    assert done.left == []
    assert repair(settings_of(data)).findings == []
    after = contents(data)
    memory = str(LOG / "wal.ckpt")
    assert {**after, memory: b""} == {**sound, memory: b""}
    with Store(settings_of(data)) as store:
        read_all(store)
        assert store.topic("orders").append(b"next", durability="synced") == COUNT


@pytest.mark.parametrize("name", ["wal.ckpt", "wal.synced", "uploader.ckpt"])
@pytest.mark.parametrize("gone", [True, False], ids=["missing", "damaged"])
def test_what_only_remembers_is_written_again(name: str, gone: bool, data: Path) -> None:
    path = data / LOG / name
    if gone:
        path.unlink()
    else:
        flip(path, 20)
    found = repair(settings_of(data)).findings
    optional = name == "uploader.ckpt" and gone
    assert [each.where for each in found] == ([] if optional else [str(path)])
    assert path.exists() != gone
    assert mend(data).left == []
    assert repair(settings_of(data)).findings == []
    with StoreView(settings_of(data)) as view:
        assert view.topic("orders").end_offset == COUNT, "others see it before an owner opens it"
    with Store(settings_of(data)) as store:
        read_all(store)


def test_another_topics_object_is_replaced_by_the_right_one(data: Path) -> None:
    """Its frames are valid and have the right offsets: only the hash tells them apart."""
    before = (data / OBJECT).read_bytes()
    foreign = [encode_frame(at, bytes(each)[::-1]) for at, each in scan(before)]
    (data / OBJECT).write_bytes(b"".join(foreign))
    [found] = repair(settings_of(data)).findings
    assert "hash" in found.what
    assert mend(data).left == []
    assert (data / OBJECT).read_bytes() == before
    assert repair(settings_of(data)).findings == []


def test_an_index_that_is_wrong_is_put_right(data: Path) -> None:
    with closing(StoreResources(settings_of(data))) as resources:
        name = parse_topic("orders")
        [made] = resources.catalog.get_object_descriptors(name)
        wrong = replace(made, offset_index=((0, 0), (5, 1)))
        assert resources.catalog.replace_descriptor(name, made, wrong)
    [found] = [each for each in repair(settings_of(data)).findings if each.kind is Kind.OBJECT]
    assert "index says 1" in found.what
    assert mend(data).left == []
    assert repair(settings_of(data)).findings == []
    with closing(StoreResources(settings_of(data))) as resources:
        [now] = resources.catalog.get_object_descriptors(name)
        assert now.offset_index is not None
        resources.read_back(name, now)


def test_copies_of_all_that_is_changed_are_kept(data: Path) -> None:
    flip(data / LOG / "wal.log", 300)
    flip(data / OBJECT, 3000)
    damaged = contents(data)
    done = mend(data)
    assert done.copies is not None
    kept = Path(done.copies) / "default" / "orders"
    assert (kept / "wal.log").read_bytes() == damaged[str(LOG / "wal.log")]
    assert (kept / OBJECT.name).read_bytes() == damaged[str(OBJECT)]


def test_segment_and_object_put_each_other_right(data: Path) -> None:
    sound = contents(data)
    flip(data / LOG / "wal.1.log", 300)
    flip(data / OBJECT, 300)
    assert mend(data).left == []
    after = contents(data)
    assert after[str(OBJECT)] == sound[str(OBJECT)]
    assert after[str(LOG / "wal.1.log")] == sound[str(LOG / "wal.1.log")]


@pytest.mark.parametrize("accept_loss", [False, True])
def test_what_both_tiers_have_lost_is_left_alone(data: Path, accept_loss: bool) -> None:
    flip(data / LOG / "wal.log", 300)
    flip(data / OBJECT, 300)
    damaged = contents(data)
    done = mend(data, accept_loss=accept_loss)
    assert {each.kind for each in done.left} == {Kind.SEGMENT, Kind.OBJECT}
    assert "2 to 2" in done.left[0].remedy
    assert contents(data) == damaged


def test_a_log_is_not_cut_while_an_object_before_the_loss_is_damaged(data: Path) -> None:
    flip(data / LOG / "wal.log", 300)
    flip(data / OBJECT, 300)
    flip(data / LOG / "wal.3.log", 300)
    damaged = contents(data)
    done = mend(data, accept_loss=True)
    assert {each.kind for each in done.left} == {Kind.SEGMENT, Kind.OBJECT, Kind.LOSS}
    assert contents(data) == damaged


def test_a_log_that_may_be_another_one_is_not_believed(data: Path) -> None:
    other = data.parent / "other"
    with Store(settings_of(other)) as store:
        topic = store.topic("orders")
        topic.append_many([b"another"] * COUNT, durability="synced")
    shutil.rmtree(data / LOG)
    shutil.copytree(other / LOG, data / LOG)
    remove(data, "wal.id", "wal.id.copy")
    cut(data / OBJECT, 3000)
    damaged = contents(data)
    done = mend(data)
    assert {each.kind for each in done.left} == {Kind.LOG_ID, Kind.OBJECT}
    assert contents(data) == damaged


LOSSES: dict[str, tuple[tuple[int, ...], Callable[[Path], object]]] = {
    "in a sealed segment": ((62,), lambda d: flip(d / LOG / "wal.3.log", 300)),
    "in the newest segment": ((82,), lambda d: flip(d / LOG / "wal.4.log", 300)),
    "in two segments": (
        (62, 82),
        lambda d: [flip(d / LOG / f"wal.{seq}.log", 300) for seq in (3, 4)],
    ),
    "the newest segment cut short": (
        tuple(range(89, 100)),
        lambda d: cut(d / LOG / "wal.4.log", 1000),
    ),
    "the newest segment gone": (tuple(range(80, 100)), lambda d: remove(d, "wal.4.log")),
    "a sealed segment gone": (tuple(range(60, 80)), lambda d: remove(d, "wal.3.log")),
    "the beginning of the log and its memories": (
        tuple(range(60, 80)),
        lambda d: remove(
            d, "wal.ckpt", "wal.synced", "wal.log", "wal.1.log", "wal.2.log", "wal.3.log"
        ),
    ),
}


@pytest.mark.parametrize("damage", LOSSES)
def test_what_is_nowhere_becomes_lost_only_with_leave(damage: str, data: Path) -> None:
    lost, spoil = LOSSES[damage]
    spoil(data)
    damaged = contents(data)
    for look in (repair(settings_of(data)), mend(data)):
        kinds = {each.kind for each in look.left}
        assert Kind.LOSS in kinds
        assert kinds <= {Kind.LOSS, Kind.CHECKPOINT, Kind.POSITION}
        assert contents(data) == damaged
    assert mend(data, accept_loss=True).left == []
    assert repair(settings_of(data)).findings == []
    with StoreView(settings_of(data)) as view:
        record = view.topic("orders").record
        assert record is not None
        holes = {offset for start, end in record.lost for offset in range(start, end)}
        assert holes == set(lost)
        assert record.tail == max(lost) + 1
    with Store(settings_of(data)) as store:
        read_all(store, lost)
        topic = store.topic("orders")
        assert topic.append(b"next", durability="synced") == COUNT
        topic.upload()
        assert topic.watermarks().verified == COUNT + 1


def test_damage_at_random_places_never_costs_what_is_still_somewhere(data: Path) -> None:
    dice = random.Random(5)
    sound = contents(data)
    for _ in range(6):
        name = dice.choice(["wal.log", "wal.1.log", "wal.2.log"])
        path = data / LOG / name
        for _ in range(dice.randint(1, 3)):
            at = dice.randrange(path.stat().st_size)
            raw = path.read_bytes()
            spoiled = dice.choice([raw[:at], raw[:at] + dice.randbytes(9) + raw[at + 9 :]])
            path.write_bytes(spoiled)
        assert mend(data).left == []
        assert contents(data)[str(LOG / name)] == sound[str(LOG / name)]


def test_frames_of_another_topic_in_a_payload_are_not_taken_for_this_ones(tmp_path: Path) -> None:
    settings = settings_of(tmp_path / "data")
    with Store(settings) as store:
        other = store.topic("other")
        other.append_many([b"other %d" % number for number in range(10)], durability="synced")
        copied = other.segments()[0].path.read_bytes()
        orders = store.topic("orders")
        batch = [b"first", b"second", copied, *(b"%d" % number for number in range(3, 8))]
        orders.append_many(batch, durability="synced")
        orders.rotate()
        path = orders.segments()[0].path
    sound = path.read_bytes()
    at = sound.index(copied)
    header = sound.rindex((2).to_bytes(8, "little"), 0, at - 20)
    flip(path, header + 10, 0x40)
    (finding,) = repair(settings, ["orders"]).findings
    assert finding.kind is Kind.LOSS
    assert "offsets 2 to 2 are nowhere else" in finding.what


def test_a_torn_tail_is_no_damage(data: Path) -> None:
    with (data / LOG / "wal.4.log").open("ab") as file:
        file.write(b"\x64\0\0\0\0\0\0\0torn")
    assert repair(settings_of(data)).findings == []


def test_a_topic_in_use_is_refused(data: Path) -> None:
    with Store(settings_of(data)) as store:
        store.topic("orders")
        for apply in (False, True):
            with pytest.raises(LogLocked, match=str(data)):
                repair(settings_of(data), apply=apply)


def test_a_store_that_is_served_is_refused(data: Path) -> None:
    with served(settings_of(data)) as server:
        note = ServerInfo(server.url, server.context.instance, 1)
        server_file(data).write_bytes(note.encode())
        with pytest.raises(UsageError, match=f"{server.url}.*stop it"):
            repair(settings_of(data))


def test_a_lost_catalog_is_left_to_restore(data: Path) -> None:
    (data / "catalog.db").unlink()
    for each in data.glob("catalog.db-*"):
        each.unlink()
    (finding,) = mend(data).left
    assert finding.kind is Kind.CATALOG
    assert "forebay restore /default/orders" in finding.remedy
    assert not (data / "catalog.db").exists()


def test_a_log_of_an_earlier_owner_is_left_alone_if_it_can_be_opened(data: Path) -> None:
    write_log_id(LocalDisk(), data / LOG, "0" * 32)
    assert repair(settings_of(data)).findings == []


def test_a_damaged_log_of_an_earlier_owner_is_set_aside(data: Path) -> None:
    flip(data / LOG / "wal.4.log", 300)
    write_log_id(LocalDisk(), data / LOG, "0" * 32)
    with Store(settings_of(data)) as store, pytest.raises(CorruptFrame, match="forebay repair"):
        store.topic("orders")
    (finding,) = mend(data).findings
    assert finding.repaired
    assert not list((data / LOG).glob("wal*.log"))
    assert list((data / LOG).glob("aside-*wal.4.log"))
    with Store(settings_of(data)) as store:
        store.topic("orders").append(b"one more", durability="synced")


def test_unknown_topics_and_stores_in_memory_are_refused(data: Path) -> None:
    with pytest.raises(UnknownTopic, match="/default/absent"):
        repair(settings_of(data), ["absent"])
    with pytest.raises(UsageError, match="memory"):
        repair(replace(settings_of(data), data=None))


# ---- interrupted --------------------------------------------------------------------------------


class Setup:
    """A store on a disk that crashes, with its catalog and objects in memory."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.power = CrashDisk(self.clock)
        self.faults = FaultDisk(self.power)
        self.settings = settings_of("/data")
        self.kv = FaultKv(SqliteKv(None))
        self.backend = FaultBackend(MemoryBackend())
        self.catalog = Catalog(self.kv, clock=self.clock)
        self.objects = CloudStore(self.backend)

    def store(self) -> Store:
        return Store(
            self.settings,
            disk=self.faults,
            clock=self.clock,
            catalog=self.catalog,
            store=self.objects,
        )

    def repair(self) -> RepairReport:
        resources = StoreResources(
            self.settings, self.clock, catalog=self.catalog, store=self.objects
        )
        try:
            return repair(
                self.settings,
                apply=True,
                accept_loss=True,
                disk=self.faults,
                clock=self.clock,
                resources=resources,
            )
        finally:
            resources.close()


def spoil(disk: Disk, name: str, position: int) -> None:
    path = Path("/data") / LOG / name
    file = disk.open_append(path)
    file.write_at(b"\xff\xff", position)
    file.sync()
    file.close()


@pytest.mark.parametrize("seed", [None, 1])
def test_a_repair_that_lost_its_power_at_any_call_is_finished_by_the_next(
    seed: int | None,
) -> None:
    ended = False
    for call in itertools.count(0, 3 if seed is None else 7):
        setup = damaged()
        setup.faults.inject(Fault("any", errno.EIO, skip=call, times=None))
        try:
            setup.repair()
        except (ForebayError, OSError):
            assert setup.faults.fired
        else:
            ended = not setup.faults.fired
        setup.faults.clear()
        setup.power.crash(None if seed is None else random.Random(seed * 1000 + call))
        require_finished(setup, f"at call {call}")
        if ended:
            break


def damaged() -> Setup:
    """A segment that an object holds, one that none does, and an object are damaged."""
    setup = Setup()
    with setup.store() as store:
        fill(store)
    spoil(setup.power, "wal.1.log", 300)
    spoil(setup.power, "wal.3.log", 300)
    key = "storage/topics/default/orders/objects/data-0-59.dnb1"
    raw = bytearray(setup.backend.get_range(key, 0, setup.backend.head(key).size))
    raw[30] ^= 4
    setup.backend.put_object(key, bytes(raw))
    return setup


def require_finished(setup: Setup, when: str) -> None:
    assert setup.repair().left == [], when
    assert setup.repair().findings == [], when
    with setup.store() as store:
        read_all(store, (62,))
        assert store.topic("orders").append(b"next") == COUNT
    require_chain(setup)


def require_chain(setup: Setup) -> None:
    record = setup.catalog.record(parse_topic("orders"))
    assert record is not None
    assert record.lost == ((62, 63),)
    found = list(setup.catalog.get_object_descriptors(parse_topic("orders")))
    assert [(each.start_offset, each.next_offset) for each in found] == [(0, 60), (60, 62)]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_repair_whose_object_store_went_away_is_finished_by_the_next(
    when: Literal["before", "after"],
) -> None:
    for call in itertools.count(0, 2):
        setup = damaged()
        fault = ObjectFault("any", when=when, skip=call, times=None)
        setup.backend.inject(fault)
        try:
            setup.repair()
        except ForebayError:
            ended = False
        else:
            ended = True
        setup.backend.clear()
        require_finished(setup, f"at call {call}")
        if ended:
            assert call > 4
            return


@pytest.mark.parametrize("applied", [False, True])
def test_a_repair_whose_catalog_went_away_is_finished_by_the_next(applied: bool) -> None:
    for call in itertools.count(1):
        setup = damaged()
        setup.kv.fail("commit", at=call, times=20, applied=applied)
        try:
            setup.repair()
        except ForebayError:
            ended = False
        else:
            ended = True
        setup.kv.heal()
        require_finished(setup, f"at commit {call}")
        if ended:
            assert call > 2
            return
