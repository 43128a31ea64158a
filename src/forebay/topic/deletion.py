"""The part of a topic's deletion that is on this machine: its log, and whoever has it open.

`forebay.upload.deletion` has the protocol. Here the topic is ended for its users in this process,
and the files of its log are removed, with the lock on its directory held. A directory is removed
only while the catalog says that its topic was deleted: nobody can open it as the newest log then.

Beware: only the directory of this machine is removed. Another machine that had the topic removes
its own when it opens the topic, or when its server starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from forebay.catalog.catalog import Catalog
from forebay.catalog.records import Owner, TopicRecord
from forebay.errors import DiskError, LogLocked, TopicDeleted, TopicOwned, remedy
from forebay.files.disk import Disk
from forebay.format.names import PUBLISHED_FILE, TopicName, is_topic, parse_topic
from forebay.topic.opening import lock_name
from forebay.topic.resources import StoreResources
from forebay.topic.storage import WalStorage
from forebay.wal.checkpoints import Publisher


def deleted_here(topic: TopicName) -> TopicDeleted:
    """Returns the error for those who use a topic that this process deletes."""
    return TopicDeleted(
        f"{topic}: this process has deleted the topic; open it again to create a new one of that "
        "name, which has new offsets, or to go on with this one if the deletion failed"
    )


def topics_below(root: Path, list_dir: Callable[[Path], list[str]]) -> set[TopicName]:
    """Returns the topics that have a directory below `root`."""
    found: set[TopicName] = set()
    for namespace in list_dir(root):
        names = (f"/{namespace}/{topic}" for topic in list_dir(root / namespace))
        found.update(parse_topic(name) for name in names if is_topic(name))
    return found


def not_deleted(catalog: Catalog, topics: Iterable[TopicName]) -> Iterator[TopicName]:
    """Yields those topics of which the catalog does not know that they were deleted."""
    for topic in topics:
        record = catalog.find(topic)
        if record is None or not record.is_deleted:
            yield topic


class LocalDeletion:
    """Ends the use of one topic on this machine, and removes its log.

    `storage` is the topic as this process has it open, or had it; None if it did not.
    """

    def __init__(
        self,
        resources: StoreResources,
        disk: Disk,
        directory: Path,
        topic: TopicName,
        storage: WalStorage | None,
    ) -> None:
        self._resources = resources
        self._disk = disk
        self._directory = directory
        self._topic = topic
        self._storage = storage
        self._publisher: Publisher | None = None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the lock on the directory, as far as there is one.

        A log that is open in this process has it until `remove`. Raises TopicOwned if another
        process has the lock.
        """
        try:
            if self._storage is None or self._storage.wal.released:
                self._lock()
            yield
        finally:
            if self._publisher is not None:
                self._publisher.close()

    def _lock(self) -> None:
        if not self._disk.exists(self._directory):
            return
        try:
            self._publisher = Publisher(self._disk, self._directory)
        except FileNotFoundError:  # another process has just removed it
            return
        except LogLocked as error:
            raise TopicOwned(f"{self._topic}: {error}") from error
        except OSError as error:
            raise self._failed(error) from error

    # -- for `begin_deletion` -------------------------------------------------------------------

    def ended(self, owner: Owner) -> bool:
        """Whether the owner is this process, or one that had the lock that this process has."""
        if owner.name == self._resources.session.name:
            return True
        storage = self._storage
        locked = self._publisher is not None or (storage is not None and not storage.wal.released)
        return locked and owner.lock == lock_name(self._disk, self._directory)

    def end_storage(self) -> None:
        """Ends the topic for its users in this process. Its next offset is fixed from then on."""
        if self._storage is not None:
            self._storage.end_for_deletion(deleted_here(self._topic))

    def end(self, record: TopicRecord) -> int | None:
        """Returns where the log ends, if this process is the owner that the record has."""
        storage = self._storage
        if storage is None or storage.epoch != record.epoch or not storage.wal.ended:
            return None
        return storage.wal.current_offset()

    # -- the files ------------------------------------------------------------------------------

    def remove(self) -> int:
        """Removes the directory, if the catalog says that the topic was deleted.

        Returns the number of files. After a crash in between, the rest is removed by whoever opens
        the topic. Raises DiskError.
        """
        if self._storage is not None:
            self._storage.abandon()
            if self._publisher is None:
                self._lock()
        record = self._resources.catalog.find(self._topic)
        if self._publisher is None or record is None or not record.is_deleted:
            return 0
        try:
            return self._remove_files()
        except OSError as error:
            raise self._failed(error) from error

    def _remove_files(self) -> int:
        disk, directory = self._disk, self._directory
        names = disk.list_dir(directory)
        for name in sorted(names, key=lambda name: name == PUBLISHED_FILE):  # it has the lock
            disk.unlink(directory / name)
        disk.sync_dir(directory)
        disk.remove_dir(directory)
        disk.sync_dir(directory.parent)
        return len(names)

    def _failed(self, error: OSError) -> DiskError:
        return DiskError(
            error.errno,
            f"{self._directory}: the log of a deleted topic cannot be removed: {error}; "
            f"{remedy(error)}, then delete the topic again",
        )
