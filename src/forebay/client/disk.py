"""A server's segments, for a process that cannot see the server's directory.

A process sees the directory if `<data>/server.json` there has the instance of its settings, or
the one that the server itself gives. A directory that is elsewhere, or an old copy at the same
path, has no such file, and is not read while the server runs.

`ServerDisk` is the part of a `Disk` that executors need: segments, read in order, a window of some
megabytes at a time. Everything else raises PermissionError.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final, NoReturn

from forebay.client.address import read_server_info, wal_root
from forebay.client.http import ClientPool, ServerClient, topic_path
from forebay.errors import (
    ForebayError,
    ObjectMissing,
    OffsetOutOfRange,
    ServiceUnavailable,
    UnknownTopic,
)
from forebay.files.disk import AppendFile
from forebay.format.names import TopicName, is_topic, parse_topic
from forebay.limits import MIB
from forebay.settings import ServerAddress, StoreSettings

WINDOW_BYTES: Final = 8 * MIB
"""Of one request for a part of a segment."""
_TIMEOUT_SECONDS: Final = 5.0


def server_to_ask(settings: StoreSettings) -> ServerAddress | None:
    """The server whose files this process cannot see; None if it sees them, or there is none.

    Settings outlive a run of the server. Where the directory is here and its file has another
    instance than the settings, the server is asked for its own: the directory may be that of its
    next run, or nobody may serve it any more.
    """
    server = settings.server
    if server is None or settings.data is None:
        return None
    info = read_server_info(settings.data)
    here = None if info is None else info.instance
    logs = os.path.isdir(wal_root(settings))  # noqa: PTH112  # also where it may not be looked at
    if here is not None and here == server.instance and (logs or settings.wal_root is None):
        return None
    if not logs:
        return server
    now = _instance_at(server)
    return None if now in (None, here) else server


def _instance_at(address: ServerAddress) -> str | None:
    """Which run of the server is there; None if none responds."""
    try:
        # It may be another program by now, which must not see the token.
        with ServerClient(replace(address, token=None), timeout_seconds=_TIMEOUT_SECONDS) as client:
            return client.identity().instance
    except ForebayError:
        return None


class ServerDisk:
    """The segments of a server's topics, below the directory where the server has them."""

    def __init__(self, pool: ClientPool, wal_root: Path, log_id: str | None = None) -> None:
        self._pool = pool
        self._root = wal_root
        self._log_id = log_id

    def of_log(self, log_id: str | None) -> ServerDisk:
        """The same, where a topic whose segments are of another log is CommitRefused."""
        return ServerDisk(self._pool, self._root, log_id)

    def open_read(self, path: Path) -> ServerFile:
        file = ServerFile(self._pool, path, *self._place(path), self._log_id)
        file.size()
        return file

    def size(self, path: Path) -> int:
        return self.open_read(path).size()

    def exists(self, path: Path) -> bool:
        """Of a segment; nothing else is here."""
        try:
            self.open_read(path)
        except FileNotFoundError:
            return False
        return True

    def list_dir(self, path: Path) -> list[str]:
        raise FileNotFoundError(errno.ENOENT, "it is the server's, and not here", str(path))

    def _place(self, path: Path) -> tuple[TopicName, str]:
        parts = path.relative_to(self._root).parts if path.is_relative_to(self._root) else ()
        if len(parts) != 3 or not is_topic(f"/{parts[0]}/{parts[1]}"):
            raise FileNotFoundError(errno.ENOENT, "it is no segment of the server", str(path))
        return parse_topic(f"/{parts[0]}/{parts[1]}"), parts[2]

    def _refused(self, path: Path) -> NoReturn:
        raise PermissionError(
            errno.EROFS, f"it is on the machine of {self._pool.address.url}", str(path)
        )

    def modified(self, path: Path) -> float:
        self._refused(path)

    def make_dirs(self, path: Path) -> None:
        self._refused(path)

    def create(self, path: Path) -> AppendFile:
        self._refused(path)

    def open_append(self, path: Path) -> AppendFile:
        self._refused(path)

    def open_locked(self, path: Path) -> AppendFile:
        self._refused(path)

    def replace(self, source: Path, target: Path) -> None:  # noqa: ARG002  # as the protocol has it
        self._refused(source)

    def unlink(self, path: Path) -> None:
        self._refused(path)

    def sync_dir(self, path: Path) -> None:
        self._refused(path)


class ServerFile:
    """A segment of a server, as far as it is synced. Not thread-safe.

    It holds one window, and asks for the next when a read leaves it.
    """

    def __init__(
        self,
        pool: ClientPool,
        path: Path,
        topic: TopicName,
        name: str,
        log_id: str | None,
    ) -> None:
        self._pool = pool
        self._path = path
        self._target = topic_path(topic, "segments", name)
        self._query = {} if log_id is None else {"log": log_id}
        self._window = memoryview(b"")
        self._start = 0
        self._size: int | None = None

    def size(self) -> int:
        """By the last response."""
        if self._size is None:
            self._fetch(0, 1)  # the response to a HEAD could not say what is wrong
        assert self._size is not None
        return self._size

    def read_into(self, buffer: memoryview, position: int) -> int:
        filled = 0
        while filled < len(buffer):
            at = position + filled - self._start
            if not 0 <= at < len(self._window):
                self._fetch(position + filled, max(WINDOW_BYTES, len(buffer) - filled))
                at = 0
                if not self._window:
                    break
            piece = self._window[at : at + len(buffer) - filled]
            buffer[filled : filled + len(piece)] = piece
            filled += len(piece)
        return filled

    def _fetch(self, start: int, count: int) -> None:
        """Empty if the synced part of the segment ends at `start` or before."""
        self._window, self._start = memoryview(b""), start
        headers = {"Range": f"bytes={start}-{start + count - 1}"}
        with self._borrowed() as client:
            try:
                response = client.request("GET", self._target, query=self._query, headers=headers)
            except OffsetOutOfRange as error:
                self._size = error.end
                return
            data = response.read(count)
            self._size = int(response.headers["Content-Range"].rpartition("/")[2])
        expected = min(count, self._size - start)
        if len(data) != expected:
            raise ServiceUnavailable(f"{self._path}: {len(data)} bytes came, not {expected}")
        self._window = memoryview(data)

    @contextmanager
    def _borrowed(self) -> Iterator[ServerClient]:
        """A client; what the server does not have is FileNotFoundError."""
        try:
            with self._pool.borrowed() as client:
                yield client
        except (ObjectMissing, UnknownTopic) as error:
            raise FileNotFoundError(errno.ENOENT, str(error), str(self._path)) from error

    def close(self) -> None:
        self._window = memoryview(b"")
