"""Whether an open file is still where it was opened, on every disk."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from forebay.files.disk import AppendFile, append_all
from forebay.testing import CrashDisk, Fault, FaultDisk
from support.disk_places import PLACES, Place
from support.disks import errno_text

Take = Callable[[Place], None]


@pytest.fixture(params=sorted(PLACES))
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    place = PLACES[request.param](tmp_path)
    place.disk.make_dirs(place.root / "dir")
    return place


def opened(place: Place, how: str) -> AppendFile:
    path = place.root / "dir" / "file"
    if how == "open_append":
        place.disk.create(path).close()
    file: AppendFile = getattr(place.disk, how)(path)
    return file


def remove(place: Place) -> None:
    place.disk.unlink(place.root / "dir" / "file")


def remove_and_create(place: Place) -> None:
    remove(place)
    place.make("dir/file", b"another")


def rename(place: Place) -> None:
    place.disk.replace(place.root / "dir" / "file", place.root / "dir" / "elsewhere")


def replace(place: Place) -> None:
    place.make("dir/other", b"another")
    place.disk.replace(place.root / "dir" / "other", place.root / "dir" / "file")


def move_directory(place: Place) -> None:
    place.disk.replace(place.root / "dir", place.root / "moved")


def replace_directory(place: Place) -> None:
    move_directory(place)
    place.disk.make_dirs(place.root / "dir")
    place.make("dir/file", b"another")


def put_a_file_where_the_directory_was(place: Place) -> None:
    move_directory(place)
    place.make("dir")


FILE_TAKEN_AWAY = [remove, remove_and_create, rename, replace]
DIRECTORY_TAKEN_AWAY = [move_directory, replace_directory, put_a_file_where_the_directory_was]


@pytest.mark.parametrize("how", ["create", "open_append", "open_locked"])
def test_a_file_that_is_written_and_synced_stays_in_place(place: Place, how: str) -> None:
    file = opened(place, how)
    append_all(file, b"data")
    file.sync()
    place.make("dir/beside")
    assert file.in_place()
    file.close()


@pytest.mark.parametrize("how", ["create", "open_append"])
@pytest.mark.parametrize("take", [*FILE_TAKEN_AWAY, *DIRECTORY_TAKEN_AWAY])
def test_a_file_taken_away_is_not_in_place_though_writes_and_syncs_succeed(
    place: Place, how: str, take: Take
) -> None:
    file = opened(place, how)
    take(place)
    assert not file.in_place()
    append_all(file, b"data")
    file.sync()
    file.close()


@pytest.mark.parametrize("take", DIRECTORY_TAKEN_AWAY)
def test_a_locked_directory_taken_away_is_not_in_place(place: Place, take: Take) -> None:
    file = opened(place, "open_locked")
    take(place)
    assert not file.in_place()
    file.close()


@pytest.mark.parametrize("take", FILE_TAKEN_AWAY)
def test_a_locked_directory_is_in_place_whatever_becomes_of_its_file(
    place: Place, take: Take
) -> None:
    file = opened(place, "open_locked")
    take(place)
    assert file.in_place()
    file.close()


def test_a_file_whose_directory_was_moved_and_put_back_is_in_place_again(place: Place) -> None:
    file = opened(place, "create")
    move_directory(place)
    place.disk.replace(place.root / "moved", place.root / "dir")
    assert file.in_place()
    file.close()


def test_a_disk_that_cannot_tell_raises() -> None:
    disk = FaultDisk(CrashDisk())
    file = disk.create(Path("/file"))
    disk.inject(Fault("in_place", errno.EIO))
    with pytest.raises(OSError, match=errno_text(errno.EIO)):
        file.in_place()
    assert file.in_place()
