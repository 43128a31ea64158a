"""Reads a server's segments over HTTP, for a process that cannot see the server's directory.

A process reads the directory itself if `<data>/server.json` has the right instance: the one in its
settings, or the one that the server reports. An old copy of the directory, at the same path on
another machine, has another instance. It is not read while the server runs.

`ServerDisk` implements the part of `Disk` that executors need: it reads segments in order, several
megabytes at a time. Listing raises FileNotFoundError, and writing raises PermissionError.
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
"""The size of one request for a part of a segment."""
_TIMEOUT_SECONDS: Final = 5.0


def server_to_ask(settings: StoreSettings) -> ServerAddress | None:
    """Returns the server to read files through; None if this process can read them itself.

    Settings may be older than the server's current run. If the directory exists here and names
    another instance than the settings, this asks the server for its instance. If it is the one in
    the directory, the server was restarted, and the directory is read directly. The same if no
    server responds. A process of another user, whom the directory does not let in, cannot see it.
    """
    server = settings.server
    if server is None or settings.data is None:
        return None
    info = read_server_info(settings.data)
    here = None if info is None else info.instance
    logs = _lets_in(wal_root(settings))
    if logs is None:
        return server
    if here is not None and here == server.instance and (logs or settings.wal_root is None):
        return None
    if not logs:
        return server
    now = _instance_at(server)
    return None if now in (None, here) else server


def _lets_in(directory: Path) -> bool | None:
    """Whether the directory is here; None if it is one that this user may not look into."""
    try:
        with os.scandir(directory):
            return True
    except PermissionError:
        return None
    except OSError:
        return False


def _instance_at(address: ServerAddress) -> str | None:
    """Asks the server at the address for its instance; None if no server responds."""
    try:
        # Another program may now listen at this address. It must not get the token.
        with ServerClient(replace(address, token=None), timeout_seconds=_TIMEOUT_SECONDS) as client:
            return client.identity().instance
    except ForebayError:
        return None


class ServerDisk:
    """The segments of a server's topics; `wal_root` is the server's own path. Thread-safe."""

    def __init__(self, pool: ClientPool, wal_root: Path, log_id: str | None = None) -> None:
        self._pool = pool
        self._root = wal_root
        self._log_id = log_id

    def of_log(self, log_id: str | None) -> ServerDisk:
        """Returns a disk that raises CommitRefused if a topic's log has another log id."""
        return ServerDisk(self._pool, self._root, log_id)

    def open_read(self, path: Path) -> ServerFile:
        file = ServerFile(self._pool, path, *self._place(path), self._log_id)
        file.size()
        return file

    def size(self, path: Path) -> int:
        return self.open_read(path).size()

    def exists(self, path: Path) -> bool:
        """Whether the segment exists. False for any other file."""
        try:
            self.open_read(path)
        except FileNotFoundError:
            return False
        return True

    def list_dir(self, path: Path) -> list[str]:
        raise FileNotFoundError(
            errno.ENOENT, "a directory cannot be listed through the server", str(path)
        )

    def _place(self, path: Path) -> tuple[TopicName, str]:
        parts = path.relative_to(self._root).parts if path.is_relative_to(self._root) else ()
        if len(parts) != 3 or not is_topic(f"/{parts[0]}/{parts[1]}"):
            raise FileNotFoundError(
                errno.ENOENT, "the path is not that of a segment on the server", str(path)
            )
        return parse_topic(f"/{parts[0]}/{parts[1]}"), parts[2]

    def _refused(self, path: Path) -> NoReturn:
        raise PermissionError(
            errno.EROFS,
            f"the file is on the server {self._pool.address.url}: only segments can be read",
            str(path),
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

    def remove_dir(self, path: Path) -> None:
        self._refused(path)

    def sync_dir(self, path: Path) -> None:
        self._refused(path)


class ServerFile:
    """The synced part of a server's segment. Not thread-safe.

    It holds one window of the file, and requests the next one when a read leaves the window.
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
        """Returns the size in the last response. The segment may have grown since."""
        if self._size is None:
            self._fetch(0, 1)  # not HEAD: its response has no body, so no error message
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
        """Fills the window. It stays empty if the synced part ends at or before `start`."""
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
            raise ServiceUnavailable(
                f"{self._path}: the server sent {len(data)} bytes at position {start}, "
                f"not {expected}; try again"
            )
        self._window = memoryview(data)

    @contextmanager
    def _borrowed(self) -> Iterator[ServerClient]:
        """Lends a client. Raises FileNotFoundError if the server does not have the segment."""
        try:
            with self._pool.borrowed() as client:
                yield client
        except (ObjectMissing, UnknownTopic) as error:
            raise FileNotFoundError(errno.ENOENT, str(error), str(self._path)) from error

    def close(self) -> None:
        self._window = memoryview(b"")
