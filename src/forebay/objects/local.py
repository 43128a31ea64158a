"""`LocalBackend`: objects as files below a directory, durable when a call returns.

    <root>/<key>             the bytes of the object
    <root>/.tmp/<random>     an object that is being written
    <root>/.meta/<key>.meta  the user metadata of the object, if it has any, as JSON

An object is written to a temporary file, synced and renamed to its key; then the directory is
synced. A crash before the rename leaves only the temporary file. A later start removes that once it
is a day old, unless its writer is alive: a writer holds a lock on its file.

An object that must not replace another one (`create`) is linked to its key, which fails if the key
is taken. A file system without hard links has no such call: there the key is looked up, and then
the file is renamed.

Metadata name the object's etag, and are ignored if the object has another one. They are written
before a rename, and after a link: before it they would replace those of the object that is there. A
process that dies right after the link leaves an object without metadata. An etag is the file's
modification time, size and inode number.

A copy is a hard link, and has the etag and modification time of its source. Sharing the inode is
safe because objects are never opened for writing: `put_object` replaces the file, and a delete
removes one name. Files and directories are private to their user.

Beware: unlike in a bucket, `a` and `a/b` cannot both be objects.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from forebay.errors import (
    ObjectMissing,
    ServiceError,
    ServiceRefused,
    ServiceUnavailable,
    UsageError,
    remedy,
)
from forebay.files.local import LocalDisk, open_private
from forebay.format.layout import Buffer
from forebay.objects.backend import (
    ObjectMeta,
    WriterScope,
    check_key,
    check_metadata,
    check_range,
    ends_early,
    require_etag,
    taken,
)
from forebay.objects.buffers import BufferPool

_TEMPORARY: Final = ".tmp"
_METADATA: Final = ".meta"
_LEFTOVER_SECONDS: Final = 24 * 3600
_COPY_BYTES: Final = 1 << 20
_REFUSED: Final = {
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.EISDIR,
    errno.ENOTDIR,
    errno.EEXIST,
}
_MISSING: Final = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP}
"""ELOOP, because symbolic links are not objects."""
_LINKS_REFUSED: Final = {errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EXDEV, errno.ENOSYS}


def _etag(status: os.stat_result) -> str:
    return f"{status.st_mtime_ns:x}-{status.st_size:x}-{status.st_ino:x}"


def _meta(
    key: str, status: os.stat_result, metadata: Mapping[str, str] | None = None
) -> ObjectMeta:
    modified_ms = status.st_mtime_ns // 1_000_000
    return ObjectMeta(key, status.st_size, _etag(status), modified_ms, metadata or {})


class LocalWriter(WriterScope):
    """Writes an object to a temporary file, and publishes it on `close`."""

    def __init__(
        self, backend: LocalBackend, key: str, metadata: dict[str, str], create: bool
    ) -> None:
        self._backend = backend
        self._key = key
        self._metadata = metadata
        self._publish = backend.publish_new if create else backend.publish
        self._path = backend.temporary()
        self._fd: int | None = open_private(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        with suppress(OSError):  # without the lock the file is still safe for a day
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def write(self, data: Buffer) -> None:
        fd = self._open_fd()
        with self._backend.translated("write", self._key), memoryview(data).cast("B") as view:
            taken = 0
            while taken < len(view):
                taken += os.write(fd, view[taken:])

    def close(self) -> ObjectMeta:
        fd = self._open_fd()
        try:
            with self._backend.translated("write", self._key):
                os.fsync(fd)
                status = os.fstat(fd)
                self._publish(self._path, self._key, status, self._metadata)
        finally:
            self.abort()
        return _meta(self._key, status, self._metadata)

    def abort(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            with suppress(OSError):  # it may have been renamed
                self._path.unlink()
            os.close(fd)

    def _open_fd(self) -> int:
        if self._fd is None:
            raise UsageError(f"the writer of {self._key!r} is closed or aborted")
        return self._fd

    @property
    def ended(self) -> bool:
        return self._fd is None


class LocalBackend:
    def __init__(self, root: Path | str) -> None:
        self._root = Path(root).absolute()
        self._name = f"file://{self._root}"
        self._disk = LocalDisk()
        self._made: set[Path] = set()
        self._buffers = BufferPool()
        self._remove_leftovers()

    @property
    def name(self) -> str:
        return self._name

    def head(self, key: str) -> ObjectMeta:
        path = self.path_of(key)
        with self.translated("head", key):
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode):  # nor a symbolic link: it may lead anywhere
                raise FileNotFoundError(errno.ENOENT, "no file")
        return _meta(key, status, self._metadata(key, _etag(status)))

    def get_range(self, key: str, start: int, end: int, *, etag: str | None = None) -> Buffer:
        check_range(start, end)
        with self.translated("get_range", key):
            fd = os.open(self.path_of(key), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if etag is not None:
                    require_etag(self.name, key, etag, _etag(os.fstat(fd)))
                return self._read(fd, key, start, end)
            finally:
                os.close(fd)

    def put_object(
        self,
        key: str,
        data: Buffer,
        metadata: Mapping[str, str] | None = None,
        *,
        create: bool = False,
    ) -> ObjectMeta:
        with self._writer(key, metadata, create) as writer:
            writer.write(data)
            return writer.close()

    def open_streaming_writer(
        self,
        key: str,
        *,
        chunk_bytes: int,  # noqa: ARG002 - the page cache holds what is in flight
        concurrent_parts: int,  # noqa: ARG002 - as above
        metadata: Mapping[str, str] | None = None,
        create: bool = False,
    ) -> LocalWriter:
        return self._writer(key, metadata, create)

    def copy_object(self, source: str, target: str, *, create: bool = False) -> None:
        meta = self.head(source)
        self.path_of(target)
        temporary = self.temporary()
        publish = self.publish_new if create else self.publish
        try:
            with self.translated("copy", source):
                try:
                    os.link(self.path_of(source), temporary)
                except OSError as error:
                    if error.errno not in _LINKS_REFUSED:
                        raise
                    self._rewrite(source, target, meta.metadata, create)
                    return
                publish(temporary, target, temporary.stat(), dict(meta.metadata))
        finally:
            with suppress(OSError):  # renaming onto a link to the same inode keeps both names
                temporary.unlink()

    def delete_object(self, key: str) -> None:
        path = self.path_of(key)
        with self.translated("delete", key):
            try:
                path.unlink()
            except (FileNotFoundError, NotADirectoryError):
                pass
            except IsADirectoryError:
                return
            if path.parent.is_dir():  # sync also if it was gone: its remover may have been killed
                self._disk.sync_dir(path.parent)
            with suppress(OSError):  # metadata without an object are ignored
                self._metadata_path(key).unlink()

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectMeta]:
        yield from self._walk("", prefix, after or "")

    def close(self) -> None:
        """Does nothing: no files are kept open."""

    # ---- for the writer ----

    def temporary(self) -> Path:
        """Returns an unused path for a temporary file; creates the directory if needed."""
        folder = self._root / _TEMPORARY
        with self.translated("write", _TEMPORARY):
            self._make_dirs(folder)
        return folder / secrets.token_hex(12)

    def publish(
        self, temporary: Path, key: str, status: os.stat_result, metadata: dict[str, str]
    ) -> None:
        """Turns a synced temporary file into the object `key`."""
        if metadata:
            self._write_metadata(key, _etag(status), metadata)
        self._replace(temporary, self.path_of(key))

    def publish_new(
        self, temporary: Path, key: str, status: os.stat_result, metadata: dict[str, str]
    ) -> None:
        """Turns a synced temporary file into the object `key`; raises ObjectExists.

        The temporary file stays, and is removed by the caller.
        """
        path = self.path_of(key)
        try:
            self._placed(lambda: os.link(temporary, path), path)
        except FileExistsError:
            self._require_absent(key)
            raise  # a directory or a symbolic link has the name
        except OSError as error:
            if error.errno not in _LINKS_REFUSED:
                raise
            self._require_absent(key)
            self._replace(temporary, path)
        if metadata:
            self._write_metadata(key, _etag(status), metadata)

    @contextmanager
    def translated(self, operation: str, key: str) -> Iterator[None]:
        """Turns OSError into the errors that `Backend` promises."""
        try:
            yield
        except ServiceError:
            raise
        except OSError as error:
            if error.errno in _MISSING and operation in ("head", "get_range", "copy"):
                raise ObjectMissing(f"{self._name}: there is no object {key!r}") from None
            what = f"{self._name}: {operation} of {key!r}: {error.strerror}"
            if error.errno == errno.ENAMETOOLONG:
                raise UsageError(f"{what}: use shorter parts in the key") from error
            kind = ServiceRefused if error.errno in _REFUSED else ServiceUnavailable
            raise kind(f"{what}: {remedy(error)}") from error

    # ---- inside ----

    def path_of(self, key: str) -> Path:
        """The file of the key, which may not exist; raises UsageError for an invalid key."""
        if check_key(key).split("/", 1)[0] in (_TEMPORARY, _METADATA):
            raise UsageError(
                f"the key {key!r} is reserved: {_TEMPORARY} and {_METADATA} are the store's own"
            )
        return self._root / key

    def _metadata_path(self, key: str) -> Path:
        # With another ending than the object's: a search for objects must not find it.
        return self._root / _METADATA / f"{key}{_METADATA}"

    def _require_absent(self, key: str) -> None:
        with suppress(ObjectMissing):
            self.head(key)
            raise taken(self._name, key)

    def _writer(self, key: str, metadata: Mapping[str, str] | None, create: bool) -> LocalWriter:
        self.path_of(key)
        found = check_metadata(metadata)
        with self.translated("write", key):
            return LocalWriter(self, key, found, create)

    def _read(self, fd: int, key: str, start: int, end: int) -> Buffer:
        view = self._buffers.take(end - start)
        filled = 0
        while filled < len(view):
            count = os.preadv(fd, [view[filled:]], start + filled)
            if not count:
                raise ends_early(self._name, key, start, end)
            filled += count
        if start == end:
            os.pread(fd, 0, start)  # fails for a directory
            if end > os.fstat(fd).st_size:
                raise ends_early(self._name, key, start, end)
        return view.toreadonly()

    def _rewrite(self, source: str, target: str, metadata: Mapping[str, str], create: bool) -> None:
        with (
            self.path_of(source).open("rb") as file,
            self._writer(target, metadata, create) as writer,
        ):
            while piece := file.read(_COPY_BYTES):
                writer.write(piece)

    def _metadata(self, key: str, etag: str) -> dict[str, str]:
        try:
            found = json.loads(self._metadata_path(key).read_bytes())
            return dict(found["metadata"]) if found["etag"] == etag else {}
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return {}

    def _write_metadata(self, key: str, etag: str, metadata: Mapping[str, str]) -> None:
        record = {"etag": etag, "metadata": metadata}
        temporary = self.temporary()
        try:
            with open(temporary, "xb", opener=open_private) as file:
                file.write(json.dumps(record).encode())
                file.flush()
                os.fsync(file.fileno())
            self._replace(temporary, self._metadata_path(key))
        finally:
            temporary.unlink(missing_ok=True)

    def _replace(self, source: Path, target: Path) -> None:
        self._placed(lambda: source.replace(target), target)

    def _placed(self, place: Callable[[], object], target: Path) -> None:
        """Calls `place`, which gives a file the name `target`, and syncs the directory."""
        self._make_dirs(target.parent)
        try:
            place()
        except FileNotFoundError:  # the directory was removed while it was empty
            self._made.discard(target.parent)
            self._make_dirs(target.parent)
            place()
        self._disk.sync_dir(target.parent)

    def _make_dirs(self, path: Path) -> None:
        if path not in self._made or not path.is_dir():
            self._disk.make_dirs(path)
            self._made.add(path)

    def _walk(self, folder: str, prefix: str, after: str) -> Iterator[ObjectMeta]:
        """Yields objects in order of keys: a directory sorts as its name followed by a slash."""
        for name, is_dir in self._entries(folder):
            key = folder + name
            if is_dir:
                inside = key + "/"
                below = inside.startswith(prefix) or prefix.startswith(inside)
                if below and (inside > after or after.startswith(inside)):
                    yield from self._walk(inside, prefix, after)
            elif key.startswith(prefix) and key > after:
                with suppress(FileNotFoundError):  # deleted meanwhile
                    yield _meta(key, (self._root / key).stat())

    def _entries(self, folder: str) -> Sequence[tuple[str, bool]]:
        with self.translated("list", folder):
            try:
                with os.scandir(self._root / folder) as entries:
                    found = [
                        (entry.name, entry.is_dir())
                        for entry in entries
                        if entry.is_dir() or not entry.is_symlink()
                    ]
            except FileNotFoundError:
                return []
        if not folder:
            found = [entry for entry in found if entry[0] not in (_TEMPORARY, _METADATA)]
        return sorted(found, key=lambda entry: entry[0] + "/" if entry[1] else entry[0])

    def _remove_leftovers(self) -> None:
        """Removes old temporary files that no writer has locked; ignores errors."""
        with suppress(OSError):
            for path in (self._root / _TEMPORARY).iterdir():
                if time.time() - path.stat().st_mtime > _LEFTOVER_SECONDS:
                    self._remove_leftover(path)

    def _remove_leftover(self, path: Path) -> None:
        with suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(fd)
