"""Which log a directory holds: its id, a log that begins late, and one that is set aside."""

from __future__ import annotations

import contextlib
import itertools
import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from forebay.errors import CorruptLog, ForebayError, MissingData, TopicOwned
from forebay.files.disk import read_file
from forebay.format.checkpoint import UploaderCheckpoint
from forebay.format.names import LOG_ID_COPY_FILE, LOG_ID_FILE, SegmentNames
from forebay.wal.identity import (
    LocalLog,
    LogIdentity,
    Unclaimed,
    WriteGuard,
    read_id_copy,
    read_log_id,
    set_aside_name,
    write_log_id,
)
from forebay.wal.log import Wal
from forebay.wal.view import LogView
from support.disks import LogDirectory, payloads, payloads_of, texts
from support.faulty_disks import FaultyDirectory, faulty_directory

OLD_ID = "0" * 31 + "1"


@dataclass
class Replaced:
    """A claim that gives the topic to a new log, once, and remembers it as the catalog does."""

    begin: int
    old_id: str
    owned_id: str = ""
    ids: itertools.count[int] = field(default_factory=lambda: itertools.count(0xF00))
    asked: list[LocalLog] = field(default_factory=list)

    def acquire(self, local: LocalLog) -> LogIdentity:
        self.asked.append(local)
        if local.log_id == self.owned_id and local.next_offset >= self.begin:
            return LogIdentity(local.log_id, local.next_offset)
        self.owned_id = f"{next(self.ids):032x}"
        return LogIdentity(self.owned_id, self.begin)

    @property
    def ownership(self) -> WriteGuard:
        return Unclaimed()


class Refused:
    def acquire(self, local: LocalLog) -> LogIdentity:
        raise TopicOwned("another process holds the topic")

    @property
    def ownership(self) -> WriteGuard:
        return Unclaimed()


def open_with(directory: LogDirectory, claim: Replaced | Refused, rotate: int = 300) -> Wal:
    wal = Wal(directory.settings(rotate_max_bytes=rotate), disk=directory.disk, claim=claim)
    directory.opened.append(wal)
    return wal


def write_old_log(directory: LogDirectory, count: int = 12) -> None:
    """A log of several segments, with indexes and both checkpoints, closed."""
    directory.write(LOG_ID_FILE, OLD_ID.encode())
    wal = directory.open(rotate_max_bytes=300)
    for payload in texts(0, count):
        wal.append(payload, durability="synced")
    assert wal.checkpoints is not None
    wal.checkpoints.update_uploader(UploaderCheckpoint(None, 0, 0, None, 0))
    assert len(wal.segments()) > 2
    wal.shutdown()


def aside_payloads(directory: LogDirectory, log_id: str = OLD_ID) -> list[bytes]:
    """The messages that the files set aside hold, oldest segment first."""
    names = SegmentNames(set_aside_name(log_id, "wal.log"))
    found = sorted(
        (seq, name) for name in directory.names() if (seq := names.parse(name)) is not None
    )
    return [text for _, name in found for text in payloads_of(directory.frames(name))]


# ---- ids ----


def test_a_log_gets_an_id_once_and_keeps_it(directory: LogDirectory) -> None:
    directory.open().shutdown()
    first = directory.read(LOG_ID_FILE)
    assert len(first) == 32
    assert read_log_id(directory.disk, directory.path) == first.decode()
    wal = directory.open()
    wal.append(b"one", durability="synced")
    wal.shutdown()
    directory.open()
    assert directory.read(LOG_ID_FILE) == first


def test_two_logs_have_two_ids(tmp_path: Path) -> None:
    ids = set()
    for name in ("a", "b"):
        directory = faulty_directory()
        directory.path = Path("/data") / name
        directory.open()
        ids.add(directory.read(LOG_ID_FILE))
        directory.close()
    assert len(ids) == 2


def test_a_directory_without_an_id_has_none_until_it_is_opened(crashing: LogDirectory) -> None:
    crashing.disk.make_dirs(crashing.path)
    assert read_log_id(crashing.disk, crashing.path) is None


@pytest.mark.parametrize(
    "damage",
    [b"", b"0" * 31, b"0" * 33, b"G" * 32, b"\xff" * 32, b"0" * 5000, ("é" * 32).encode()],
)
def test_a_damaged_id_is_an_error_that_names_the_file_and_changes_nothing(
    crashing: LogDirectory, damage: bytes
) -> None:
    write_old_log(crashing)
    crashing.write(LOG_ID_FILE, damage)
    before = crashing.contents()
    with pytest.raises(CorruptLog, match=r"wal\.id"):
        crashing.open()
    assert crashing.contents() == before
    crashing.write(LOG_ID_FILE, OLD_ID.encode() + b"\n")
    assert payloads(crashing.open()) == texts(0, 12)


def test_the_id_has_a_copy_and_a_log_where_they_disagree_is_not_opened(
    crashing: LogDirectory,
) -> None:
    write_old_log(crashing)
    assert read_id_copy(crashing.disk, crashing.path) == OLD_ID
    claim = Replaced(5000, OLD_ID)
    for damage in (None, b"0" * 30 + b"11"):
        crashing.remove(LOG_ID_FILE)
        if damage is not None:
            crashing.write(LOG_ID_FILE, damage)
        before = crashing.contents()
        with pytest.raises(CorruptLog, match=r"wal\.id.*`forebay repair`"):
            open_with(crashing, claim)
        assert crashing.contents() == before
        assert claim.asked == []
        crashing.write(LOG_ID_FILE, OLD_ID.encode())
    assert payloads(crashing.open()) == texts(0, 12)


@pytest.mark.parametrize("damage", [None, b"", b"0" * 33, (OLD_ID + " 00000000\n").encode()])
def test_a_copy_that_is_missing_or_damaged_is_made_anew(
    crashing: LogDirectory, damage: bytes | None
) -> None:
    write_old_log(crashing)
    crashing.remove(LOG_ID_COPY_FILE)
    if damage is not None:
        crashing.write(LOG_ID_COPY_FILE, damage)
    assert read_id_copy(crashing.disk, crashing.path) is None
    assert payloads(crashing.open()) == texts(0, 12)
    assert read_id_copy(crashing.disk, crashing.path) == OLD_ID


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_an_id_and_its_copy_never_disagree_after_a_power_loss(seed: int | None) -> None:
    new_id = "0" * 31 + "2"
    for call in itertools.count():
        directory = faulty_directory()
        write_old_log(directory)
        directory.fail("any", skip=call, times=None)
        with contextlib.suppress(OSError):
            write_log_id(directory.disk, directory.path, new_id)
        fired = directory.faults.fired
        directory.faults.clear()
        directory.power.crash(None if seed is None else random.Random(seed * 10_000 + call))
        own, copy = (read(directory.disk, directory.path) for read in (read_log_id, read_id_copy))
        assert own in (OLD_ID, new_id)
        assert copy in (own, None)
        if not fired:
            assert (own, copy) == (new_id, new_id)
            return


def test_a_claim_that_refuses_leaves_the_log_as_it_is(crashing: LogDirectory) -> None:
    write_old_log(crashing)
    before = crashing.contents()
    with pytest.raises(TopicOwned):
        open_with(crashing, Refused())
    assert crashing.contents() == before
    assert payloads(crashing.open()) == texts(0, 12)


# ---- a log that begins late ----


def test_a_log_begun_at_an_offset_is_found_there_again(directory: LogDirectory) -> None:
    claim = Replaced(1000, OLD_ID)
    for _ in range(3):
        wal = open_with(directory, claim)
        assert (wal.start_offset, wal.current_offset()) == (1000, 1000)
        wal.shutdown()
    assert [local.next_offset for local in claim.asked] == [0, 1000, 1000]
    wal = open_with(directory, claim)
    assert wal.append(b"first", durability="synced") == 1000
    wal.shutdown()
    wal = open_with(directory, claim)
    assert (wal.start_offset, wal.current_offset()) == (1000, 1001)
    assert payloads(wal) == [b"first"]


@pytest.mark.parametrize("seed", [None, *range(5)])
def test_a_log_begun_at_an_offset_survives_a_power_loss_before_its_first_message(
    crashing: LogDirectory, seed: int | None
) -> None:
    claim = Replaced(1000, OLD_ID)
    open_with(crashing, claim)
    assert crashing.crash is not None
    crashing.crash.crash(None if seed is None else random.Random(seed))
    wal = open_with(crashing, claim)
    assert (wal.start_offset, wal.current_offset()) == (1000, 1000)
    assert claim.asked[-1].log_id == claim.owned_id
    assert wal.append(b"first", durability="synced") == 1000
    crashing.crash.crash(None if seed is None else random.Random(seed))
    assert payloads(open_with(crashing, claim)) == [b"first"]


def test_a_view_of_a_log_that_begins_late_is_empty_there(directory: LogDirectory) -> None:
    wal = open_with(directory, Replaced(1000, OLD_ID))
    view = LogView(directory.path, disk=directory.disk)
    assert (view.start_offset, view.end_offset, view.segments()) == (1000, 1000, [])
    with view.reader(1000) as reader:
        assert list(reader) == []
    for text in texts(1000, 1020):
        wal.append(text, durability="synced")
    view.refresh()
    assert (view.start_offset, view.end_offset) == (1000, 1020)
    with view.reader(1000) as reader:
        assert [message.payload for message in reader] == texts(1000, 1020)


# ---- set aside ----


def test_a_log_that_is_no_longer_the_topics_is_kept_whole_under_other_names(
    directory: LogDirectory,
) -> None:
    write_old_log(directory)
    before = directory.contents()
    claim = Replaced(5000, OLD_ID)
    wal = open_with(directory, claim)
    assert claim.asked == [LocalLog(OLD_ID, 0, 12)]
    assert (wal.start_offset, wal.current_offset()) == (5000, 5000)
    assert wal.segments() == []
    after = directory.contents()
    ids = {LOG_ID_FILE, LOG_ID_COPY_FILE}
    kept = [name for name in before if name not in {*ids, "wal.synced"}]
    assert {set_aside_name(OLD_ID, name): before[name] for name in kept}.items() <= after.items()
    assert aside_payloads(directory) == texts(0, 12)
    assert after[LOG_ID_FILE].decode() == claim.owned_id
    assert wal.append(b"new", durability="synced") == 5000
    wal.shutdown()
    assert payloads(open_with(directory, claim)) == [b"new"]


def test_a_log_set_aside_is_a_log_of_another_file_name(crashing: LogDirectory) -> None:
    write_old_log(crashing)
    open_with(crashing, Replaced(5000, OLD_ID)).shutdown()
    names = SegmentNames(set_aside_name(OLD_ID, "wal.log"))
    for name in crashing.names():
        if name.startswith("aside-") and name.endswith(".log"):
            assert names.parse(name) is not None
            assert SegmentNames().parse(name) is None


def test_a_log_set_aside_twice_overwrites_nothing(crashing: LogDirectory) -> None:
    """For example when the same old copy is put back twice."""
    write_old_log(crashing)
    copy = crashing.contents()
    open_with(crashing, Replaced(5000, OLD_ID)).shutdown()
    first = {name: data for name, data in crashing.contents().items() if "aside-" in name}
    for name in crashing.names():
        if not name.startswith("aside-"):
            crashing.remove(name)
    for name, data in copy.items():
        crashing.write(name, data)
    open_with(crashing, Replaced(6000, OLD_ID)).shutdown()
    after = crashing.contents()
    assert first.items() <= after.items()
    for name, data in first.items():
        original = name.removeprefix(f"aside-{OLD_ID}-")
        assert after[set_aside_name(OLD_ID, original, 1)] == data


def test_an_empty_log_leaves_nothing_aside(crashing: LogDirectory) -> None:
    crashing.write(LOG_ID_FILE, OLD_ID.encode())
    crashing.open().shutdown()
    wal = open_with(crashing, Replaced(7, OLD_ID))
    assert wal.current_offset() == 7
    assert not [name for name in crashing.names() if "aside" in name]


def everything_kept(directory: FaultyDirectory, wal: Wal) -> list[bytes]:
    """All old messages, wherever they are: set aside, or still in the log."""
    names = SegmentNames()
    found = sorted(
        (seq, name) for name in directory.names() if (seq := names.parse(name)) is not None
    )
    still = [text for _, name in found for text in payloads_of(directory.frames(name))]
    assert wal.current_offset() >= 5000
    return aside_payloads(directory) + [text for text in still if text.startswith(b"message")]


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_a_power_loss_at_every_call_while_a_log_is_set_aside_loses_nothing(
    seed: int | None,
) -> None:
    for call in itertools.count():
        directory = faulty_directory()
        write_old_log(directory)
        claim = Replaced(5000, OLD_ID)
        directory.fail("any", skip=call, times=None)
        with contextlib.suppress(OSError, ForebayError):
            open_with(directory, claim)
        fired = directory.faults.fired
        directory.faults.clear()
        directory.power.crash(None if seed is None else random.Random(seed * 10_000 + call))
        reopened = open_with(directory, claim)
        assert everything_kept(directory, reopened) == texts(0, 12), f"at call {call}"
        assert (reopened.start_offset, reopened.current_offset()) == (5000, 5000)
        assert reopened.append(b"next", durability="synced") == 5000
        assert payloads(reopened) == [b"next"]
        directory.close()
        if not fired:
            assert call > 30
            return


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_a_power_loss_at_every_call_around_the_first_message_of_a_log_that_begins_late(
    seed: int | None,
) -> None:
    for call in itertools.count():
        directory = faulty_directory()
        claim = Replaced(5000, OLD_ID)
        wal = open_with(directory, claim)
        directory.fail("any", skip=call, times=None)
        acknowledged = 0
        with contextlib.suppress(OSError, ForebayError):
            wal.append(b"new", durability="synced")
            acknowledged = 1
        fired = directory.faults.fired
        directory.faults.clear()
        directory.power.crash(None if seed is None else random.Random(seed * 10_000 + call))
        reopened = open_with(directory, claim)
        found = payloads(reopened)
        assert reopened.start_offset == 5000
        assert found == [b"new"] * len(found)
        assert len(found) >= acknowledged
        directory.close()
        if not fired:
            assert call > 5
            return


def test_a_disk_that_fails_at_every_call_while_a_log_is_set_aside_and_is_mended() -> None:
    """The process goes on, and opens the log again."""
    for call in itertools.count():
        directory = faulty_directory()
        write_old_log(directory)
        claim = Replaced(5000, OLD_ID)
        directory.fail("any", skip=call)
        with contextlib.suppress(OSError, ForebayError):
            open_with(directory, claim).shutdown()
        fired = directory.faults.fired
        directory.faults.clear()
        reopened = open_with(directory, claim)
        assert everything_kept(directory, reopened) == texts(0, 12), f"at call {call}"
        directory.close()
        if not fired:
            assert call > 30
            return


def test_a_log_whose_new_beginning_was_lost_is_begun_anew_and_not_at_zero(
    crashing: LogDirectory,
) -> None:
    claim = Replaced(1000, OLD_ID)
    open_with(crashing, claim).shutdown()
    crashing.remove("wal.ckpt")
    crashing.remove("wal.synced")
    wal = open_with(crashing, claim)
    assert claim.asked[-1].next_offset == 0
    assert wal.current_offset() == 1000


def test_a_log_that_has_no_file_left_but_had_messages_is_refused(crashing: LogDirectory) -> None:
    write_old_log(crashing)
    for name in crashing.names():
        if name.endswith(".log"):
            crashing.remove(name)
    with pytest.raises(MissingData):
        open_with(crashing, Replaced(5000, OLD_ID))


def test_the_id_of_a_log_can_be_read_by_others(tmp_path: Path, directory: LogDirectory) -> None:
    wal = directory.open()
    found = read_log_id(directory.disk, directory.path)
    assert found is not None
    assert found.encode() == read_file(directory.disk, directory.path / LOG_ID_FILE, bytes_max=64)
    wal.shutdown()
