"""What is behind a `Store` and a `Topic`, for tests of what runs in the background.

Users have no way to it and need none: cycles run by themselves. A test runs a cycle at a moment
that it chooses, and looks at the checkpoint that it left.
"""

from __future__ import annotations

from forebay.format.checkpoint import UploaderCheckpoint
from forebay.topic.factory import WalStorageFactory
from forebay.topic.storage import WalStorage
from forebay.topic.store import Store, Topic
from forebay.wal.checkpoints import CheckpointStore


def factory_of(store: Store) -> WalStorageFactory:
    return store._factory


def storage_of(topic: Topic) -> WalStorage:
    return topic._storage


def checkpoints_of(topic: Topic) -> CheckpointStore:
    checkpoints = storage_of(topic).wal.checkpoints
    assert checkpoints is not None
    return checkpoints


def uploader_checkpoint(topic: Topic) -> UploaderCheckpoint:
    """How far the uploader says that it has got."""
    found = checkpoints_of(topic).get_uploader()
    assert found is not None
    return found
