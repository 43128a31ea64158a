"""Files that are removed, moved or replaced under an open log: it stops before it acknowledges."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import forebay
from forebay.errors import DiskError, LogStopped, LostOffsets, MissingData
from forebay.format.checkpoint import UploaderCheckpoint
from forebay.wal.log import Wal
from support.closed_logs import EVERYTHING, fill
from support.disks import LogDirectory, on_local_disk, payloads, texts

Take = Callable[[LogDirectory], None]


def remove_tree(directory: LogDirectory) -> None:
    shutil.rmtree(directory.path)


def move(directory: LogDirectory) -> None:
    directory.disk.replace(directory.path, directory.path.with_name("elsewhere"))


def replace_with_empty(directory: LogDirectory) -> None:
    move(directory)
    directory.disk.make_dirs(directory.path)


def replace_with_copy(directory: LogDirectory) -> None:
    files = directory.contents()
    move(directory)
    for name, data in files.items():
        directory.write(name, data)


def remove_segment(directory: LogDirectory) -> None:
    directory.remove("wal.log")


def rename_segment(directory: LogDirectory) -> None:
    directory.disk.replace(directory.path / "wal.log", directory.path / "saved.log")


def replace_segment(directory: LogDirectory) -> None:
    directory.write("wal.log", directory.read("wal.log"))


WITHIN_A_DISK = [
    move,
    replace_with_empty,
    replace_with_copy,
    remove_segment,
    rename_segment,
    replace_segment,
]


def start(directory: LogDirectory) -> Wal:
    wal = directory.open()
    for payload in texts(0, 5):
        wal.append(payload, durability="synced")
    return wal


def expect_stopped(wal: Wal, directory: LogDirectory) -> None:
    """The next synced append is refused with the path and what to do, and so is every later one."""
    for _ in range(2):
        with pytest.raises(LogStopped) as caught:
            wal.append(b"never acknowledged", durability="synced")
        assert caught.value.synced == 5
        assert str(directory.path) in str(caught.value)
        assert "removed, moved or replaced" in str(caught.value)
        assert "put back what was moved" in str(caught.value)
    assert wal.watermarks().synced == 5


@pytest.mark.parametrize("take", WITHIN_A_DISK)
def test_a_log_whose_files_were_taken_away_acknowledges_nothing_more(
    directory: LogDirectory, take: Take
) -> None:
    wal = start(directory)
    take(directory)
    expect_stopped(wal, directory)


def test_a_log_whose_directory_was_deleted_acknowledges_nothing_more(tmp_path: Path) -> None:
    directory = on_local_disk(tmp_path)
    wal = start(directory)
    remove_tree(directory)
    expect_stopped(wal, directory)
    assert not directory.path.exists()
    directory.close()


def test_a_store_whose_wal_was_deleted_continues_only_after_a_restart_that_records_the_loss(
    tmp_path: Path,
) -> None:
    store = forebay.open(tmp_path)
    topic = store.topic("t")
    given = [topic.append(text, durability="synced") for text in texts(0, 5)]
    shutil.rmtree(tmp_path / "wal")
    with pytest.raises(LogStopped, match="removed, moved or replaced"):
        topic.append(b"not acknowledged", durability="synced")
    with pytest.raises(MissingData, match="put the missing files back"):
        store.topic("t")
    with pytest.raises(LogStopped, match="a restart of the process"):
        store.close()
    with forebay.open(tmp_path) as store:
        again = store.topic("t").append(b"after the loss", durability="synced")
        assert again > given[-1] + 1
        with pytest.raises(LostOffsets):
            list(store.topic("t").read(start=0))


def test_a_directory_that_is_moved_back_opens_with_everything_acknowledged(
    directory: LogDirectory,
) -> None:
    wal = start(directory)
    move(directory)
    expect_stopped(wal, directory)
    directory.disk.replace(directory.path.with_name("elsewhere"), directory.path)
    wal.abandon()
    assert payloads(directory.open())[:5] == texts(0, 5)


def test_a_removed_segment_is_told_again_when_the_log_is_opened(directory: LogDirectory) -> None:
    wal = start(directory)
    remove_segment(directory)
    expect_stopped(wal, directory)
    wal.abandon()
    with pytest.raises(MissingData, match="everything before offset 5 was synced"):
        directory.open()


def rotate(wal: Wal) -> None:
    wal.rotate()


def begin_segment(wal: Wal) -> None:
    wal.append(b"in a new segment", durability="synced")


def trim(wal: Wal) -> None:
    wal.retain(EVERYTHING, 5)


def upload(wal: Wal) -> None:
    assert wal.checkpoints is not None
    wal.checkpoints.update_uploader(UploaderCheckpoint(None, 5, 0, None, 0))


def close(wal: Wal) -> None:
    wal.shutdown()


@pytest.mark.parametrize("operation", [rotate, begin_segment, trim, upload, close])
def test_another_log_in_the_directorys_place_is_never_written_to(
    directory: LogDirectory, operation: Callable[[Wal], None]
) -> None:
    """Rotation, retention and checkpoints name files by their paths, which now lead elsewhere."""
    wal = start(directory)
    if operation in (begin_segment, trim):
        wal.rotate()
    if operation is trim:
        wal.append(b"the next segment", durability="synced")
    moved = directory.path.with_name("elsewhere")
    directory.disk.replace(directory.path, moved)
    fill(directory, 3)  # another process begins a log there
    before = directory.contents()
    with pytest.raises((LogStopped, DiskError), match="removed, moved or replaced"):
        operation(wal)
    assert directory.contents() == before


def test_a_reader_of_a_deleted_log_gets_what_is_in_memory_and_an_error_for_the_rest(
    tmp_path: Path,
) -> None:
    directory = on_local_disk(tmp_path)
    fill(directory)
    wal = directory.open()
    wal.append(b"message 5", durability="synced")
    remove_tree(directory)
    assert payloads(wal, 5) == [b"message 5"]
    with pytest.raises(MissingData, match=r"wal\.log"):
        payloads(wal, 0)
    directory.close()
