"""What only objects on this machine's disk can get wrong: what killed processes leave behind."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from forebay.errors import (
    ObjectExists,
    ObjectMissing,
    ServiceRefused,
    ServiceUnavailable,
    UsageError,
)
from forebay.objects.local import LocalBackend

DAY_SECONDS = 24 * 3600

# For each step, a child that dies at the n-th call of one of the system's functions, as a killed
# process does, in a directory of its own. Prints how many children died.
PROGRAM = """
import os, signal, sys
from pathlib import Path
from forebay.objects.local import LocalBackend

root, name, create = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "create"

def deadly(function, passing):
    def call(*arguments, **named):
        nonlocal passing
        if passing == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        passing -= 1
        return function(*arguments, **named)
    return call

def upload(step):
    backend = LocalBackend(root / str(step))
    owner = Path if name in ("replace", "unlink") else os
    setattr(owner, name, deadly(getattr(owner, name), step))
    w = backend.open_streaming_writer(
        "t/new", chunk_bytes=8, concurrent_parts=1, metadata={"k": "new"}, create=create
    )
    with w:
        for _ in range(3):
            w.write(b"new" * 1000)

for step in range(30):
    child = os.fork()
    if child == 0:
        upload(step)
        os._exit(0)
    if os.waitpid(child, 0)[1] == 0:
        print(step)
        break
"""


def killed_at_every_step(root: Path, name: str, *, create: bool = False) -> int:
    """How many steps there are. `root/<n>` is what a process killed at the n-th step left."""
    how = "create" if create else "replace"
    command = [sys.executable, "-c", PROGRAM, str(root), name, how]
    done = subprocess.run(command, timeout=100, check=True, capture_output=True, text=True)
    return int(done.stdout)


@pytest.mark.parametrize(("name", "least"), [("write", 3), ("fsync", 4), ("replace", 2)])
def test_a_process_killed_at_any_step_leaves_the_old_object_or_the_new(
    tmp_path: Path, name: str, least: int
) -> None:
    for step in range(30):
        LocalBackend(tmp_path / str(step)).put_object("t/new", b"old")
    steps = killed_at_every_step(tmp_path, name)
    assert steps >= least
    for step in range(steps):
        backend = LocalBackend(tmp_path / str(step))
        assert [meta.key for meta in backend.list("")] == ["t/new"]
        meta = backend.head("t/new")
        found = bytes(backend.get_range("t/new", 0, meta.size))
        assert (found, dict(meta.metadata)) in [(b"old", {}), (b"new" * 3000, {"k": "new"})]
        assert step > 0 or found == b"old"


def test_a_process_killed_before_the_rename_leaves_nothing_visible(tmp_path: Path) -> None:
    for step in range(killed_at_every_step(tmp_path, "write")):
        backend = LocalBackend(tmp_path / str(step))
        assert list(backend.list("")) == []
        with pytest.raises(ObjectMissing):
            backend.head("t/new")


@pytest.mark.parametrize(
    ("name", "least"), [("write", 3), ("fsync", 4), ("link", 1), ("replace", 1), ("unlink", 1)]
)
def test_a_creation_that_is_killed_leaves_nothing_or_all_bytes(
    tmp_path: Path, name: str, least: int
) -> None:
    steps = killed_at_every_step(tmp_path, name, create=True)
    assert steps >= least
    for step in range(steps):
        backend = LocalBackend(tmp_path / str(step))
        found = [(meta.key, meta.size) for meta in backend.list("")]
        assert found in ([], [("t/new", 9000)])
        if found:  # a process that dies between the link and the metadata leaves none
            assert dict(backend.head("t/new").metadata) in ({}, {"k": "new"})
        with suppress(ObjectExists):
            backend.put_object("t/new", b"new" * 3000, create=True)
        assert bytes(backend.get_range("t/new", 0, 9000)) == b"new" * 3000


def test_creation_never_renames_over_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may create the object at any time before the link."""
    backend = LocalBackend(tmp_path)
    link = os.link

    def late(source: Path, target: Path) -> None:
        if target == tmp_path / "a":
            target.write_bytes(b"theirs")
        link(source, target)

    monkeypatch.setattr(os, "link", late)
    with pytest.raises(ObjectExists):
        backend.put_object("a", b"ours", {"k": "ours"}, create=True)
    assert bytes(backend.get_range("a", 0, 6)) == b"theirs"
    assert backend.head("a").metadata == {}
    assert list((tmp_path / ".tmp").iterdir()) == []


def test_a_file_system_without_links_is_looked_at_before_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(*names: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refusing)
    backend = LocalBackend(tmp_path)
    backend.put_object("a", b"first", {"k": "v"}, create=True)
    backend.put_object("source", b"second")
    with pytest.raises(ObjectExists):
        backend.put_object("a", b"second", create=True)
    with pytest.raises(ObjectExists):
        backend.copy_object("source", "a", create=True)
    assert bytes(backend.get_range("a", 0, 5)) == b"first"
    assert backend.head("a").metadata == {"k": "v"}
    assert list((tmp_path / ".tmp").iterdir()) == []


def test_a_directory_or_a_link_in_the_place_of_a_new_object_is_refused(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for key in ("folder", "link"):
        with pytest.raises(ServiceRefused):
            backend.put_object(key, b"x", create=True)
    assert not (tmp_path / "elsewhere").exists()


# ---- temporary files ----


def age(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


def test_old_temporary_files_of_dead_processes_go_at_start(tmp_path: Path) -> None:
    assert killed_at_every_step(tmp_path, "write") > 0
    tmp_path /= "1"
    (left,) = (tmp_path / ".tmp").iterdir()
    LocalBackend(tmp_path)
    assert left.exists(), "it is not old yet"
    age(left, DAY_SECONDS + 60)
    LocalBackend(tmp_path)
    assert not left.exists()


def test_the_temporary_file_of_a_living_writer_stays_however_old(tmp_path: Path) -> None:
    with LocalBackend(tmp_path).open_streaming_writer(
        "t/x", chunk_bytes=8, concurrent_parts=1
    ) as writer:
        writer.write(b"bytes")
        (path,) = (tmp_path / ".tmp").iterdir()
        age(path, 30 * DAY_SECONDS)
        LocalBackend(tmp_path)
        assert path.exists()
    assert LocalBackend(tmp_path).head("t/x").size == 5


def test_no_temporary_file_stays_behind(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path)
    backend.put_object("t/a", b"x", {"k": "v"})
    backend.copy_object("t/a", "t/b")
    backend.copy_object("t/a", "t/b")
    backend.open_streaming_writer("t/c", chunk_bytes=8, concurrent_parts=1).abort()
    assert list((tmp_path / ".tmp").iterdir()) == []


# ---- errors ----


def test_a_full_disk_is_unavailable_and_publishes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = LocalBackend(tmp_path)

    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(ServiceUnavailable, match="free some space"):
            backend.put_object("t/a", b"x")
    assert list(backend.list("")) == []
    assert list((tmp_path / ".tmp").iterdir()) == []


def test_a_failed_sync_publishes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = LocalBackend(tmp_path)
    backend.put_object("t/a", b"old")

    def failing(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", failing)
        with pytest.raises(ServiceUnavailable):
            backend.put_object("t/a", b"new")
    assert bytes(backend.get_range("t/a", 0, 3)) == b"old"


def test_an_object_in_the_place_of_a_directory_is_refused(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path)
    backend.put_object("t/a", b"x")
    with pytest.raises(ServiceRefused):
        backend.put_object("t/a/b", b"x")
    with pytest.raises(ServiceRefused):
        backend.put_object("t", b"x")
    assert [meta.key for meta in backend.list("")] == ["t/a"]


def test_a_part_of_a_key_over_255_bytes_is_a_wrong_call(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="File name too long"):
        LocalBackend(tmp_path).put_object("t/" + "x" * 256, b"x")


@pytest.mark.parametrize("key", [".tmp/x", ".meta/x"])
def test_the_stores_own_directories_are_no_place_for_objects(tmp_path: Path, key: str) -> None:
    with pytest.raises(UsageError):
        LocalBackend(tmp_path).put_object(key, b"x")


# ---- the rest ----


def test_keys_are_in_the_order_of_their_bytes_across_directories(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path)
    keys = sorted(["t/a/1", "t/a-b/1", "t/ab/1", "t/a.json", "t/a0", "t/Z", "u"])
    for key in keys:
        backend.put_object(key, b"x")
    assert [meta.key for meta in backend.list("")] == keys
    for at, key in enumerate(keys):
        assert [meta.key for meta in backend.list("", after=key)] == keys[at + 1 :]


def test_a_copy_is_made_where_the_file_system_has_no_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = LocalBackend(tmp_path)
    backend.put_object("a", b"bytes" * 500_000, {"k": "v"})

    def refusing(*names: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refusing)
    backend.copy_object("a", "b")
    assert bytes(backend.get_range("b", 0, 2_500_000)) == b"bytes" * 500_000
    assert backend.head("b").metadata == {"k": "v"}
    assert (tmp_path / "a").stat().st_ino != (tmp_path / "b").stat().st_ino


def test_reading_makes_no_directory(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path / "none")
    assert list(backend.list("")) == []
    with pytest.raises(ObjectMissing):
        backend.head("a")
    assert not (tmp_path / "none").exists()
