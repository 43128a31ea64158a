"""What every `Disk` promises: the real one and the doubles.

What a crash leaves is not here: only `CrashDisk` can be crashed, and `tests/testing/test_crash.py`
does it. Here is what makes the double believable.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.files.disk import (
    AppendFile,
    append_all,
    read_file,
    replace_file,
    write_all_at,
)
from support.disk_places import PLACES, Place
from support.disks import errno_text


@pytest.fixture(params=sorted(PLACES))
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return PLACES[request.param](tmp_path)


@pytest.fixture
def file(place: Place) -> Iterator[AppendFile]:
    file = place.disk.create(place.root / "file")
    yield file
    file.close()


def test_appended_bytes_are_read_back_in_order(place: Place, file: AppendFile) -> None:
    append_all(file, b"one ")
    append_all(file, bytearray(b"two "))
    append_all(file, memoryview(b"_three_")[1:-1])
    assert place.read("file") == b"one two three"


def test_a_write_takes_at_least_one_byte_and_says_how_many(place: Place, file: AppendFile) -> None:
    taken = file.append(b"abcdef")
    assert 1 <= taken <= 6
    assert place.read("file") == b"abcdef"[:taken]


def test_appending_nothing_takes_nothing(place: Place, file: AppendFile) -> None:
    assert file.append(b"") == 0
    assert file.write_at(b"", 0) == 0
    assert place.read("file") == b""


def test_an_opened_file_goes_on_at_its_end(place: Place) -> None:
    path = place.make("file", b"before")
    file = place.disk.open_append(path)
    append_all(file, b" and after")
    file.close()
    assert place.read("file") == b"before and after"


def test_an_overwrite_changes_its_own_range_only(place: Place, file: AppendFile) -> None:
    append_all(file, b"0123456789")
    write_all_at(file, b"xyz", 4)
    assert place.read("file") == b"0123xyz789"


def test_an_overwrite_past_the_end_extends_and_appends_go_on_there(
    place: Place, file: AppendFile
) -> None:
    append_all(file, b"0123")
    write_all_at(file, b"abcd", 2)
    append_all(file, b"!")
    assert place.read("file") == b"01abcd!"
    assert file.size() == 7


def test_an_overwrite_that_would_leave_a_hole_is_refused(place: Place, file: AppendFile) -> None:
    append_all(file, b"0123")
    with pytest.raises(OSError, match=errno_text(errno.EINVAL)):
        file.write_at(b"x", 5)
    assert place.read("file") == b"0123"


def test_a_truncated_file_goes_on_at_its_new_end(place: Place, file: AppendFile) -> None:
    append_all(file, b"0123456789")
    file.truncate(3)
    assert file.size() == 3
    append_all(file, b"abc")
    assert place.read("file") == b"012abc"


def test_a_file_truncated_to_more_than_its_size_is_filled_with_zeros(
    place: Place, file: AppendFile
) -> None:
    append_all(file, b"0123")
    file.truncate(6)
    append_all(file, b"!")
    assert place.read("file") == b"0123\0\0!"


def test_sync_leaves_the_bytes_as_they_are(place: Place, file: AppendFile) -> None:
    append_all(file, b"0123")
    file.sync()
    write_all_at(file, b"x", 0)
    file.sync()
    assert place.read("file") == b"x123"


def test_the_size_is_the_same_from_every_side(place: Place, file: AppendFile) -> None:
    append_all(file, b"0123")
    reader = place.disk.open_read(place.root / "file")
    assert file.size() == reader.size() == place.disk.size(place.root / "file") == 4
    reader.close()


def test_a_closed_file_is_no_longer_usable_and_may_be_closed_again(place: Place) -> None:
    path = place.make("file", b"0123")
    appender, reader = place.disk.open_append(path), place.disk.open_read(path)
    for _ in range(2):
        appender.close()
        reader.close()
    for use in (
        lambda: appender.append(b"x"),
        lambda: appender.write_at(b"x", 0),
        lambda: appender.truncate(0),
        appender.sync,
        reader.size,
        lambda: reader.read_into(memoryview(bytearray(1)), 0),
    ):
        with pytest.raises(OSError, match=errno_text(errno.EBADF)):
            use()
    assert place.read("file") == b"0123"


@pytest.mark.parametrize(
    ("position", "size", "expected"),
    [
        (0, 10, b"0123456789"),
        (3, 4, b"3456"),
        (8, 4, b"89"),
        (10, 4, b""),
        (99, 4, b""),
        (0, 0, b""),
    ],
)
def test_a_read_is_full_unless_the_file_ends(
    place: Place, position: int, size: int, expected: bytes
) -> None:
    reader = place.disk.open_read(place.make("file", b"0123456789"))
    buffer = bytearray(b"." * size)
    taken = reader.read_into(memoryview(buffer), position)
    reader.close()
    assert taken == len(expected)
    assert buffer == expected + b"." * (size - taken)


def test_a_reader_sees_what_is_appended_after_it_was_opened(place: Place, file: AppendFile) -> None:
    reader = place.disk.open_read(place.root / "file")
    buffer = bytearray(4)
    assert reader.read_into(memoryview(buffer), 0) == 0
    append_all(file, b"0123")
    assert reader.read_into(memoryview(buffer), 0) == 4
    assert buffer == b"0123"
    reader.close()


def test_a_reader_keeps_the_file_it_opened_when_the_name_goes(place: Place) -> None:
    path = place.make("file", b"old")
    reader = place.disk.open_read(path)
    place.disk.replace(place.make("other", b"new"), path)
    place.disk.unlink(path)
    buffer = bytearray(3)
    assert reader.read_into(memoryview(buffer), 0) == 3
    assert buffer == b"old"
    reader.close()


def test_create_refuses_a_name_that_is_taken(place: Place) -> None:
    path = place.make("file", b"kept")
    with pytest.raises(FileExistsError):
        place.disk.create(path)
    assert place.read("file") == b"kept"


def test_a_missing_file_is_file_not_found(place: Place) -> None:
    missing = place.root / "missing"
    for use in (
        place.disk.open_append,
        place.disk.open_read,
        place.disk.unlink,
        place.disk.size,
        place.disk.modified,
        place.disk.list_dir,
        place.disk.sync_dir,
        lambda path: place.disk.replace(path, place.root / "other"),
        lambda path: place.disk.create(path / "below"),
        lambda path: place.disk.open_locked(path / "below"),
    ):
        with pytest.raises(FileNotFoundError):
            use(missing)
    assert not place.disk.exists(missing)


def test_a_file_is_not_a_directory(place: Place) -> None:
    path = place.make("file")
    for use in (place.disk.list_dir, place.disk.sync_dir):
        with pytest.raises(NotADirectoryError):
            use(path)
    with pytest.raises(NotADirectoryError):
        place.disk.create(path / "below")
    with pytest.raises(FileExistsError):
        place.disk.make_dirs(path)
    assert not place.disk.exists(path / "below")


def test_a_directory_is_not_a_file(place: Place) -> None:
    directory = place.root / "directory"
    place.disk.make_dirs(directory)
    for use in (
        place.disk.open_append,
        place.disk.unlink,
        lambda path: place.disk.replace(place.make("file"), path),
    ):
        with pytest.raises(IsADirectoryError):
            use(directory)


def test_names_are_listed_sorted(place: Place) -> None:
    for name in ("b", "c", "a", "B"):
        place.make(name)
    place.disk.make_dirs(place.root / "aa" / "below")
    assert place.disk.list_dir(place.root) == ["B", "a", "aa", "b", "c"]


def test_directories_are_made_with_their_parents_and_twice_is_fine(place: Place) -> None:
    deep = place.root / "one" / "two" / "three"
    place.disk.make_dirs(deep)
    place.make("one/two/three/file", b"data")
    place.disk.make_dirs(deep)
    assert place.read("one/two/three/file") == b"data"


def test_replace_moves_a_file_over_another(place: Place) -> None:
    source, target = place.make("source", b"new"), place.make("target", b"old")
    place.disk.replace(source, target)
    assert place.disk.list_dir(place.root) == ["target"]
    assert place.read("target") == b"new"


def test_a_file_replaced_by_itself_stays(place: Place) -> None:
    path = place.make("file", b"data")
    place.disk.replace(path, path)
    assert place.read("file") == b"data"


def test_replace_moves_a_directory_with_what_is_in_it(place: Place) -> None:
    place.disk.make_dirs(place.root / "before")
    place.make("before/file", b"data")
    place.disk.replace(place.root / "before", place.root / "after")
    assert place.read("after/file") == b"data"
    assert place.disk.list_dir(place.root) == ["after"]


def test_replace_refuses_to_cross_directories(place: Place) -> None:
    place.disk.make_dirs(place.root / "elsewhere")
    path = place.make("file", b"data")
    with pytest.raises(OSError, match=errno_text(errno.EXDEV)):
        place.disk.replace(path, place.root / "elsewhere" / "file")
    assert place.read("file") == b"data"


def test_a_handle_follows_its_file_through_a_rename(place: Place, file: AppendFile) -> None:
    place.disk.replace(place.root / "file", place.root / "renamed")
    append_all(file, b"data")
    file.sync()
    place.disk.sync_dir(place.root)
    assert place.read("renamed") == b"data"


def test_unlinked_names_are_free_again(place: Place) -> None:
    place.disk.unlink(place.make("file", b"old"))
    assert not place.disk.exists(place.root / "file")
    place.make("file", b"new")
    assert place.read("file") == b"new"


def test_writing_never_moves_the_modification_time_back(place: Place, file: AppendFile) -> None:
    before = place.disk.modified(place.root / "file")
    append_all(file, b"data")
    assert place.disk.modified(place.root / "file") >= before > 1_500_000_000


def test_a_locked_file_is_refused_until_it_is_closed(place: Place) -> None:
    path = place.root / "lock"
    holder = place.disk.open_locked(path)
    with pytest.raises(BlockingIOError):
        place.disk.open_locked(path)
    holder.close()
    place.disk.open_locked(path).close()


def test_closing_twice_does_not_free_the_next_holders_lock(place: Place) -> None:
    path = place.root / "lock"
    first = place.disk.open_locked(path)
    first.close()
    second = place.disk.open_locked(path)
    first.close()
    with pytest.raises(BlockingIOError):
        place.disk.open_locked(path)
    second.close()


def test_a_refused_lock_does_not_close_the_holders(place: Place) -> None:
    path = place.root / "lock"
    holder = place.disk.open_locked(path)
    for _ in range(2):
        with pytest.raises(BlockingIOError):
            place.disk.open_locked(path)
    holder.close()


def test_a_locked_file_is_written_as_any_other(place: Place) -> None:
    place.make("lock", b"who: ")
    file = place.disk.open_locked(place.root / "lock")
    append_all(file, b"broker 1")
    file.sync()
    file.close()
    assert place.read("lock") == b"who: broker 1"


def test_a_whole_file_is_read_only_up_to_the_limit(place: Place) -> None:
    path = place.make("file", b"0123")
    assert read_file(place.disk, path, bytes_max=4) == b"0123"
    with pytest.raises(ValueError, match=r"4 bytes.* 3\b"):
        read_file(place.disk, path, bytes_max=3)


def test_replace_file_makes_a_file_and_then_replaces_it(place: Place) -> None:
    for data in (b"first", b"", b"a longer third" * 100):
        replace_file(place.disk, place.root / "state", data)
        assert place.read("state") == data
    assert place.disk.list_dir(place.root) == ["state"]


def test_replace_file_clears_away_what_an_earlier_crash_left(place: Place) -> None:
    place.make("state.tmp", b"half")
    replace_file(place.disk, place.root / "state", b"whole")
    assert place.disk.list_dir(place.root) == ["state"]
    assert place.read("state") == b"whole"
