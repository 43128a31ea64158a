"""What only SQLite's catalog can get wrong: its file, its locks, its clock, and forks."""

from __future__ import annotations

import fcntl
import multiprocessing
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from forebay.catalog.connect import connect_kv
from forebay.catalog.kv import ABSENT, Change, Compare, Put, Remove
from forebay.catalog.sqlite import SqliteKv
from forebay.catalog.sqlite_file import filesystem_type, service_error
from forebay.errors import (
    InvalidSetting,
    ServiceError,
    ServiceRefused,
    ServiceUnavailable,
    TopicFenced,
)
from forebay.settings import MetadataSettings
from support.kv_stores import ManualBoottime, Watcher, increment


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "new" / "folder" / "catalog.db"


def run(program: str, *arguments: object) -> str:
    """What the program prints in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, *map(str, arguments)],
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- the file ----


def test_what_was_written_is_there_after_closing(path: Path) -> None:
    kv = SqliteKv(path)
    revision = kv.commit([], [Put("a", b"1")])
    kv.close()
    again = SqliteKv(path)
    entry = again.get("a")
    assert entry is not None
    assert (entry.value, entry.revision) == (b"1", revision)
    newer = again.commit([], [Put("a", b"2")])
    again.close()
    assert revision is not None
    assert newer == revision + 1


def test_every_commit_is_synced_and_the_log_is_write_ahead(path: Path) -> None:
    kv = SqliteKv(path)
    # Only the catalog's own connection says whether it syncs: the file does not keep that.
    with kv._file.writer() as writer:
        assert writer.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert writer.execute("PRAGMA synchronous").fetchone() == (2,)
    kv.close()


def test_a_killed_process_leaves_what_it_committed(path: Path) -> None:
    program = """
import os, signal, sys
from forebay.catalog.kv import Put
from forebay.catalog.sqlite import SqliteKv
kv = SqliteKv(sys.argv[1])
for number in range(20):
    kv.commit([], [Put(f"{number:02}", b"x"), Put("last", b"%d" % number)])
print("done", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    process = subprocess.run(
        [sys.executable, "-c", program, str(path)], check=False, capture_output=True, timeout=100
    )
    assert process.stdout == b"done\n"
    kv = SqliteKv(path)
    assert len(kv.range("0", "3", limit=100)) == 20
    assert kv.revision() == 20
    kv.close()


@pytest.mark.parametrize("content", [b"this is no database" * 100, b"x" * 4096])
def test_a_file_that_is_no_database_is_refused_by_its_path(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    with pytest.raises(ServiceRefused, match=r"catalog\.db.*SQLite"):
        SqliteKv(path)
    assert path.read_bytes() == content


def test_an_empty_file_becomes_a_catalog(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.touch()
    kv = SqliteKv(path)
    assert kv.revision() == 0
    kv.close()


def test_another_programs_database_is_refused_and_left_alone(path: Path) -> None:
    path.parent.mkdir(parents=True)
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE theirs (x)")
    other.commit()
    other.close()
    with pytest.raises(ServiceRefused, match="another program"):
        SqliteKv(path)
    other = sqlite3.connect(path)
    assert other.execute("SELECT name FROM sqlite_master").fetchall() == [("theirs",)]
    other.close()


def test_a_catalog_of_a_later_format_is_refused(path: Path) -> None:
    SqliteKv(path).close()
    other = sqlite3.connect(path)
    other.execute("PRAGMA user_version=99")
    other.close()
    with pytest.raises(ServiceRefused, match=r"\b99\b"):
        SqliteKv(path)


def test_a_damaged_database_is_refused_by_its_path(path: Path) -> None:
    kv = SqliteKv(path)
    for number in range(100):
        kv.commit([], [Put(f"{number:03}", bytes(3000))])
    kv.close()
    content = bytearray(path.read_bytes())
    content[4096:] = b"\xa5" * (len(content) - 4096)
    path.write_bytes(content)
    kv = SqliteKv(path)
    with pytest.raises(ServiceRefused, match=r"catalog\.db.*backup"):
        kv.range("0", "9", limit=100)
    with pytest.raises(ServiceRefused, match=r"catalog\.db.*backup"):
        kv.commit([], [Put("a", b"")])
    kv.close()


def test_a_directory_is_no_catalog(tmp_path: Path) -> None:
    with pytest.raises(ServiceRefused, match="permissions"):
        SqliteKv(tmp_path)


def test_a_path_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ServiceRefused, match="file"):
        SqliteKv(tmp_path / "file" / "catalog.db")


def test_nothing_is_written_to_a_file_that_was_replaced(path: Path) -> None:
    kv = SqliteKv(path)
    kv.commit([], [Put("a", b"1")])
    for file in path.parent.iterdir():
        file.unlink()
    with pytest.raises(ServiceRefused, match="replaced"):
        kv.commit([], [Put("a", b"2")])
    other = SqliteKv(path)
    with pytest.raises(ServiceRefused, match="replaced"):
        kv.commit([], [Put("a", b"2")])
    assert other.get("a") is None
    other.close()
    kv.close()


def test_a_path_with_odd_characters_works(tmp_path: Path) -> None:
    path = tmp_path / "a b?mode=memory#é%20" / "catalog.db"
    kv = SqliteKv(path)
    kv.commit([], [Put("a", b"1")])
    kv.close()
    assert path.exists()


@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        (sqlite3.SQLITE_FULL, ServiceUnavailable, "disk is full"),
        (sqlite3.SQLITE_IOERR_FSYNC, ServiceUnavailable, "disk failed"),
        (sqlite3.SQLITE_BUSY_SNAPSHOT, ServiceUnavailable, "lock"),
        (sqlite3.SQLITE_READONLY_DIRECTORY, ServiceRefused, "read-only"),
        (sqlite3.SQLITE_CANTOPEN, ServiceRefused, "permissions"),
        (sqlite3.SQLITE_CORRUPT_VTAB, ServiceRefused, "backup"),
        (sqlite3.SQLITE_MISMATCH, ServiceRefused, "refused"),
    ],
)
def test_an_error_of_sqlite_says_what_to_do(
    code: int, kind: type[ServiceError], words: str
) -> None:
    error = sqlite3.OperationalError("as SQLite says it")
    error.sqlite_errorcode = code
    meaning = service_error("the catalog here", error)
    assert type(meaning) is kind
    assert words in str(meaning)
    assert "as SQLite says it" in str(meaning)
    assert "the catalog here" in str(meaning)


def test_a_full_disk_makes_a_commit_fail_and_the_next_one_work(path: Path) -> None:
    kv = SqliteKv(path)
    kv.commit([], [Put("a", b"1")])
    # The bound holds for the connection that sets it, so it must be the catalog's own.
    with kv._file.writer() as writer:
        (pages,) = writer.execute("PRAGMA page_count").fetchone()
        writer.execute(f"PRAGMA max_page_count={pages}")
    with pytest.raises(ServiceUnavailable, match="full"):
        kv.commit([], [Put("a", b"2"), Put("b", bytes(500_000))])
    assert kv.range("a", "c", limit=9)[0].value == b"1"
    assert kv.commit([], [Put("a", b"3")]) == 2
    kv.close()


# ---- locks ----


def test_a_lock_held_for_too_long_is_unavailable_to_writers_and_not_to_readers(path: Path) -> None:
    kv = SqliteKv(path, timeout_seconds=0.05)
    kv.commit([], [Put("a", b"1")])
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(ServiceUnavailable, match="lock"):
        kv.commit([], [Put("a", b"2")])
    entry = kv.get("a")
    assert entry is not None
    assert entry.value == b"1"
    other.execute("ROLLBACK")
    other.close()
    assert kv.commit([], [Put("a", b"2")]) == 2
    kv.close()


def test_leases_are_granted_and_used_under_the_lock_file(path: Path) -> None:
    kv = SqliteKv(path, timeout_seconds=0.05)
    lease = kv.grant(60)
    with path.with_name("catalog.db.lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ServiceUnavailable, match=r"catalog\.db\.lock"):
            kv.grant(60)
        with pytest.raises(ServiceUnavailable, match=r"catalog\.db\.lock"):
            kv.commit([], [Put("a", b"", lease)])
        assert kv.commit([], [Put("a", b"")]) is not None
    assert kv.commit([], [Put("a", b"", lease)]) is not None
    kv.close()


@pytest.mark.parametrize(
    "kind", ["nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "lustre", "fuse.sshfs", "fuse.glusterfs"]
)
def test_a_network_file_system_is_refused(tmp_path: Path, kind: str) -> None:
    mountinfo = (
        "22 1 254:0 / / rw shared:1 - ext4 /dev/vda rw\n"
        f"90 22 0:50 / {tmp_path}/net rw - {kind} server:/x rw\n"
    )
    with pytest.raises(InvalidSetting, match=f"{kind}.*etcd"):
        SqliteKv(tmp_path / "net" / "deep" / "catalog.db", mountinfo=mountinfo)
    assert not (tmp_path / "net").exists()
    SqliteKv(tmp_path / "network" / "catalog.db", mountinfo=mountinfo).close()


def test_the_deepest_and_latest_mount_counts() -> None:
    mountinfo = (
        "1 0 0:1 / / rw - nfs4 s:/ rw\n"
        "2 1 0:2 / /data rw master:1 propagate_from:2 - ext4 /dev/a rw\n"
        "3 2 0:3 / /data/with\\040blank rw - cifs //s/x rw\n"
        "4 2 0:4 / /over rw - nfs s:/y rw\n"
        "5 2 0:5 / /over rw - xfs /dev/b rw\n"
        "a line that is something else\n"
    )
    for path, kind in {
        "/other": "nfs4",
        "/data": "ext4",
        "/data/x": "ext4",
        "/data/with blank/x": "cifs",
        "/database": "nfs4",
        "/over/x": "xfs",
    }.items():
        assert filesystem_type(Path(path), mountinfo) == kind
    assert filesystem_type(Path("/x"), "") is None


# ---- leases and the clock ----


def test_a_lease_of_another_boot_has_ended(path: Path) -> None:
    clock = ManualBoottime()
    kv = SqliteKv(path, boottime=clock, boot_id="first")
    lease = kv.grant(3600)
    kv.commit([], [Put("owner", b"1", lease)])
    kv.close()
    clock.now = 1.0  # the machine has just come up
    kv = SqliteKv(path, boottime=clock, boot_id="second")
    assert kv.get("owner") is None
    with pytest.raises(TopicFenced):
        kv.keep_alive(lease)
    assert kv.grant(10) != lease
    kv.close()


def test_a_lease_outlives_its_process_and_ends_for_all_others(path: Path) -> None:
    clock = ManualBoottime()
    kv = SqliteKv(path, boottime=clock)
    kv.commit([], [Put("owner", b"1", kv.grant(10))])
    kv.close()
    other = SqliteKv(path, boottime=clock)
    assert other.commit([Compare("owner", ABSENT)], [Put("owner", b"2")]) is None
    clock.now += 10
    assert other.commit([Compare("owner", ABSENT)], [Put("owner", b"2")]) is not None
    other.close()


def test_the_machines_own_clock_ends_leases(path: Path) -> None:
    kv = SqliteKv(path)
    short, long = kv.grant(0.05), kv.grant(3600)
    kv.commit([], [Put("long", b"", long)])
    with pytest.raises(TopicFenced):  # noqa: PT012 - until it ends
        while True:
            kv.commit([], [Put("short", b"", short)])
    assert [entry.key for entry in kv.range("a", "z", limit=9)] == ["long"]
    kv.close()


# ---- watches ----


def test_changes_that_were_cut_off_are_an_error_and_later_ones_are_told(path: Path) -> None:
    kv = SqliteKv(path, changes_max=10)
    for number in range(1, 31):
        assert kv.commit([], [Put("a", b"%d" % number)]) == number
    with pytest.raises(ServiceError, match="after revision 1 "):
        next(iter(kv.watch("a", "b", after=1)))
    watch = kv.watch("a", "b", after=29)
    assert next(iter(watch)) == Change("a", b"30", 30)
    watch.close()
    kv.close()


def test_a_watch_that_is_overtaken_says_so(path: Path) -> None:
    kv = SqliteKv(path, changes_max=10)
    slow = kv.watch("a", "b", after=0)
    kv.commit([], [Put("a", b"")])
    assert next(iter(slow)).revision == 1
    for _ in range(50):
        kv.commit([], [Put("a", b"")])
    with pytest.raises(ServiceError, match="after revision 0 "):
        next(iter(slow))
    kv.close()


def test_a_watch_of_a_quiet_range_is_not_overtaken_by_a_busy_one(path: Path) -> None:
    kv = SqliteKv(path, changes_max=10)
    reached, found = kv.changes("q", "r", 0, None)
    for _ in range(50):
        kv.commit([], [Put("a", b"")])
        reached, found = kv.changes("q", "r", 0, reached)
        assert found == []
    kv.commit([], [Put("q", b"1")])
    _, found = kv.changes("q", "r", 0, reached)
    assert [change for _, change in found] == [Change("q", b"1", 51)]
    kv.close()


def test_the_log_of_changes_is_bounded_in_bytes(path: Path) -> None:
    kv = SqliteKv(path, changes_bytes_max=100_000)
    for _ in range(50):
        kv.commit([], [Put("a", bytes(10_000))])
    kv.commit([], [Remove("a")])
    kv.close()
    with closing(sqlite3.connect(path)) as file:
        (kept,) = file.execute("SELECT sum(length(value)) FROM changes").fetchone()
        (counted,) = file.execute("SELECT bytes FROM state").fetchone()
    assert kept == counted <= 100_000


def test_a_watch_sees_what_another_process_writes(path: Path) -> None:
    kv = SqliteKv(path)
    watcher = Watcher(kv.watch("a", "b", after=0))
    run(
        "import sys\n"
        "from forebay.catalog.kv import Put\n"
        "from forebay.catalog.sqlite import SqliteKv\n"
        "kv = SqliteKv(sys.argv[1])\n"
        "for value in (b'1', b'2'): kv.commit([], [Put('a', value)])\n"
        "kv.close()\n",
        path,
    )
    assert [change.value for change in watcher.wait_for(2)] == [b"1", b"2"]
    watcher.close()
    kv.close()


# ---- forks ----

FORK = """
import os, signal, sys, threading
from forebay.catalog.kv import Put
from forebay.catalog.sqlite import SqliteKv
from forebay.errors import LogClosed
kv = SqliteKv(sys.argv[1] if len(sys.argv) > 1 else None, timeout_seconds=60)

def in_child(work):
    child = os.fork()
    if child == 0:
        signal.alarm(90)
        try:
            os._exit(work())
        finally:
            os._exit(70)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
"""


def test_a_forked_child_and_its_parent_both_go_on(path: Path) -> None:
    program = (
        FORK
        + """
stop = threading.Event()
done = []

def write():
    count = 0
    while not stop.is_set():
        kv.commit([], [Put("parent", b"%d" % count)])
        kv.get("parent")
        count += 1
    done.append(count)

threads = [threading.Thread(target=write) for _ in range(2)]
for thread in threads: thread.start()

def work():
    for number in range(10):
        kv.commit([], [Put(f"child-{os.getpid()}-{number}", b"x")])
    assert len(kv.range(f"child-{os.getpid()}-", f"child-{os.getpid()}.", limit=99)) == 10
    kv.close()
    return 0

codes = [in_child(work) for _ in range(5)]
stop.set()
for thread in threads: thread.join()
assert len(kv.range("child", "childz", limit=99)) == 50
assert kv.revision() == 50 + sum(done), (kv.revision(), done)
kv.close()
print(codes)
"""
    )
    assert run(program, path) == "[0, 0, 0, 0, 0]\n"
    with closing(sqlite3.connect(path)) as file:
        assert file.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_forked_child_has_no_catalog_in_memory() -> None:
    program = (
        FORK
        + """
kv.commit([], [Put("a", b"1")])

def work():
    try:
        kv.get("a")
    except LogClosed as error:
        assert "parent" in str(error)
        return 7

print(in_child(work), kv.get("a").value)
"""
    )
    assert run(program) == "7 b'1'\n"


def test_a_spawned_process_shares_the_file(path: Path) -> None:
    kv = SqliteKv(path, timeout_seconds=60)
    process = multiprocessing.get_context("spawn").Process(target=_increment, args=(str(path),))
    process.start()
    increment(kv, "n", 20)
    process.join(100)
    assert process.exitcode == 0
    entry = kv.get("n")
    assert entry is not None
    assert entry.value == b"40"
    kv.close()


def _increment(path: str) -> None:
    kv = SqliteKv(path, timeout_seconds=60)
    increment(kv, "n", 20)
    kv.close()


# ---- from settings ----


def test_the_settings_say_where_the_file_is(tmp_path: Path) -> None:
    for settings, data, expected in (
        (MetadataSettings(), tmp_path / "data", tmp_path / "data" / "catalog.db"),
        (MetadataSettings(path=tmp_path / "own.db"), tmp_path / "data", tmp_path / "own.db"),
        (MetadataSettings(path=str(tmp_path / "text.db")), None, tmp_path / "text.db"),
    ):
        kv = connect_kv(settings, data)
        assert kv.name == f"the catalog {expected}"
        assert kv.commit([], [Put("a", b"")]) == 1
        kv.close()
        assert expected.exists()


def test_without_a_directory_the_catalog_is_in_memory() -> None:
    one, two = (connect_kv(MetadataSettings(), None) for _ in range(2))
    assert "memory" in one.name
    one.commit([], [Put("a", b"")])
    assert two.get("a") is None
    one.close()
    two.close()
