"""Readers in other processes see what is published, without gaps."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

from forebay.testing import CrashDisk
from forebay.wal.view import LogView
from support.closed_logs import EVERYTHING, SEGMENT_BYTES, fill_segments
from support.disks import LogDirectory, on_local_disk, payloads, texts, wait_until

VIEWER = """
import sys, pathlib
from forebay.wal.view import LogView
view = LogView(pathlib.Path(sys.argv[1]))
for line in sys.stdin:
    view.refresh()
    with view.reader(view.start_offset) as reader:
        messages = list(reader)
    assert [m.offset for m in messages] == list(range(view.start_offset, view.end_offset))
    assert [m.payload.decode() for m in messages] == [f"message {m.offset}" for m in messages]
    print(view.start_offset, view.end_offset, flush=True)
"""


def test_another_process_reads_what_is_published_and_nothing_behind_it(tmp_path: Path) -> None:
    directory = on_local_disk(tmp_path)
    wal = directory.open(rotate_max_bytes=SEGMENT_BYTES)
    command = [sys.executable, "-c", VIEWER, str(directory.path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as viewer:
        assert viewer.stdin is not None
        assert viewer.stdout is not None

        def seen() -> tuple[int, int]:
            assert viewer.stdin is not None
            assert viewer.stdout is not None
            print("look", file=viewer.stdin, flush=True)
            start, end = viewer.stdout.readline().split()
            return int(start), int(end)

        assert seen() == (0, 0)
        for payload in texts(0, 20):
            wal.append(payload)
        assert seen() == (0, 0), "buffered messages are not published"
        wal.flush()
        assert seen() == (0, 20)
        for payload in texts(20, 40):
            wal.append(payload, durability="synced")
            assert seen() == (0, wal.current_offset())
        wal.retain(EVERYTHING, 30)
        assert seen() == (wal.start_offset, 40)
        # Bytes that are in the file but not published are not read.
        newest = wal.segments()[-1].path
        with newest.open("ab") as file:
            file.write(newest.read_bytes()[:30])
        assert seen() == (wal.start_offset, 40)
        viewer.stdin.close()
        assert viewer.wait(60) == 0
    directory.close()


def test_a_view_of_a_log_whose_retention_runs_meanwhile_never_shows_a_hole(
    crashing: LogDirectory,
) -> None:
    fill_segments(crashing, 60)
    wal = crashing.open(rotate_max_bytes=SEGMENT_BYTES)
    dropped: list[int] = []

    class Racing(CrashDisk):
        """Retention removes files after they were listed and before they are opened."""

        def __init__(self, inner: CrashDisk) -> None:
            self.__dict__.update(inner.__dict__)

        def modified(self, path: Path) -> float:
            modified = super().modified(path)
            if not dropped:
                dropped.extend(s.seq for s in wal.retain(EVERYTHING, 45))
            return modified

    assert crashing.crash is not None
    view = LogView(crashing.path, disk=Racing(crashing.crash))
    assert dropped
    segments = view.segments()
    for before, after in pairwise(segments):
        assert after.seq == before.seq + 1
        assert before.end_offset == after.first_offset
    assert segments[0].seq > dropped[-1]
    with view.reader(segments[0].first_offset) as reader:
        assert [m.payload for m in reader] == texts(segments[0].first_offset, 60)


def test_a_closed_logs_directory_can_be_opened_by_anybody(directory: LogDirectory) -> None:
    wal = directory.open()
    wal.append(b"one")
    wal.shutdown()
    second = directory.open()
    wait_until(lambda: second.current_offset() == 1)
    assert payloads(second) == [b"one"]
