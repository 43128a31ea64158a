"""The lock: one log at a time writes to a directory, also when a process forks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from forebay.errors import LogClosed, LogLocked, MissingData
from support.closed_logs import fill_segments
from support.disks import LogDirectory, on_local_disk, payloads, texts

# -- the lock -----------------------------------------------------------------------------------


def test_a_second_log_in_the_same_process_is_refused(directory: LogDirectory) -> None:
    wal = directory.open()
    wal.append(b"mine", durability="synced")
    with pytest.raises(LogLocked, match=f"process {os.getpid()}") as caught:
        directory.open()
    assert str(directory.path) in str(caught.value)
    assert wal.append(b"still mine", durability="synced") == 1
    wal.shutdown()
    assert payloads(directory.open()) == [b"mine", b"still mine"]


def test_another_process_is_refused_while_the_log_is_open_and_told_who_has_it(
    tmp_path: Path,
) -> None:
    directory = on_local_disk(tmp_path)
    wal = directory.open()
    wal.append(b"mine", durability="synced")
    script = (
        "import os, sys, pathlib\n"
        "from forebay import Wal, WalSettings\n"
        "from forebay.errors import LogLocked\n"
        "try:\n"
        "    Wal(WalSettings(dir=pathlib.Path(sys.argv[1])))\n"
        "except LogLocked as error:\n"
        "    print(error)\n"
        "    sys.exit(0 if f'process {os.getppid()}' in str(error) else 2)\n"
        "sys.exit(3)\n"
    )
    command = [sys.executable, "-c", script, str(directory.path)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    assert wal.append(b"still mine", durability="synced") == 1
    wal.shutdown()


def test_a_failed_open_releases_the_lock(directory: LogDirectory) -> None:
    names = fill_segments(directory)
    saved = directory.read(names[1])
    directory.remove(names[1])
    for _ in range(2):
        with pytest.raises(MissingData):
            directory.open()
    directory.write(names[1], saved)
    assert payloads(directory.open()) == texts(0, 30)


# -- fork ---------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_can_neither_write_to_the_log_nor_keep_its_lock(tmp_path: Path) -> None:
    directory = on_local_disk(tmp_path)
    wal = directory.open()
    wal.append(b"before", durability="synced")
    wal.append(b"buffered in the parent")
    from_parent, to_child = os.pipe()
    pid = os.fork()
    if pid == 0:  # the child
        code = 1
        signal.alarm(100)  # a child that hangs must not outlive the test
        try:
            os.close(to_child)
            refused = 0
            for call in (
                lambda: wal.append(b"child"),
                lambda: wal.append(b"child", durability="synced"),
                lambda: wal.append_many([b"child"]),
                wal.rotate,
            ):
                try:
                    call()
                except LogClosed:
                    refused += 1
            wal.shutdown()
            os.read(from_parent, 1)
            code = 0 if refused == 4 else 2
        finally:
            os._exit(code)
    os.close(from_parent)
    wal.append(b"after", durability="synced")
    wal.shutdown()
    reopened = directory.open()  # while the child is still there
    expected = [b"before", b"buffered in the parent", b"after"]
    assert payloads(reopened) == expected
    os.close(to_child)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert reopened.append(b"and on", durability="synced") == 3
    reopened.shutdown()
    assert payloads(directory.open()) == [*expected, b"and on"]
    directory.close()
