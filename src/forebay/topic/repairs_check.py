"""Whether a log would open: recovery itself is asked, before anything is changed.

What a repair has planned is shown to recovery as if it were done: new files under the names of
those that they replace, and files that are to be removed as if they were gone.

What a caller gets wrong: it says nothing about frames in the middle of sealed segments, which
recovery does not read. The survey has read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from forebay.clock import SYSTEM_CLOCK
from forebay.errors import ForebayError
from forebay.files.disk import AppendFile, Disk, ReadFile
from forebay.format.checkpoint import WalCheckpoint
from forebay.format.names import FAILED_FILE
from forebay.format.published import Published
from forebay.topic.repairs_survey import Survey
from forebay.wal.recovery import Recovery


class _CheckedError(Exception):
    """Recovery has seen all that it wants to see, and begins to write."""


class PlannedDisk:
    """A disk as it will be, for reading: `staged` says which file takes which one's place."""

    def __init__(
        self,
        disk: Disk,
        staged: Mapping[Path, Path] | None = None,
        gone: frozenset[Path] = frozenset(),
    ) -> None:
        self._disk = disk
        self._staged = dict(staged or {})
        self._gone = gone

    def _place(self, path: Path) -> Path:
        if path in self._gone:
            raise FileNotFoundError(str(path))
        return self._staged.get(path, path)

    def list_dir(self, path: Path) -> list[str]:
        names = {*self._disk.list_dir(path), *(each.name for each in self._staged)}
        return sorted(names - {each.name for each in self._gone})

    def exists(self, path: Path) -> bool:
        if path in self._gone or path.name == FAILED_FILE:
            return False  # a note of a failed sync asks for writing, not for a check
        return self._disk.exists(self._place(path))

    def size(self, path: Path) -> int:
        return self._disk.size(self._place(path))

    def modified(self, path: Path) -> float:
        return self._disk.modified(self._place(path))

    def open_read(self, path: Path) -> ReadFile:
        return self._disk.open_read(self._place(path))

    def unlink(self, path: Path) -> None: ...

    def sync_dir(self, path: Path) -> None: ...

    def make_dirs(self, path: Path) -> NoReturn:  # noqa: ARG002
        raise _CheckedError

    def create(self, path: Path) -> AppendFile:  # noqa: ARG002
        raise _CheckedError

    def open_append(self, path: Path) -> AppendFile:  # noqa: ARG002
        raise _CheckedError

    def replace(self, source: Path, target: Path) -> NoReturn:  # noqa: ARG002
        raise _CheckedError

    def open_locked(self, path: Path) -> AppendFile:  # noqa: ARG002
        raise _CheckedError


def why_closed(
    disk: Disk, survey: Survey, checkpoint: WalCheckpoint | None, published: Published | None
) -> str | None:
    """What recovery would say against the log, or None. Changes nothing on a PlannedDisk."""
    recovery = Recovery(disk, survey.directory, survey.names, SYSTEM_CLOCK, checkpoint, published)
    try:
        recovery.run()
    except _CheckedError:
        return None
    except ForebayError as error:
        return str(error)
    return None
