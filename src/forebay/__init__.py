"""Forebay: a tiered log store.

Every topic is one append-only log. See `forebay.open`.
"""

from forebay.errors import ForebayError
from forebay.format.message import MessageId, StreamMessage
from forebay.settings import DeleterSettings, StoreSettings, WalSettings
from forebay.topic.storage import StartPosition, WalStorage, WalStorageFactory
from forebay.topic.store import Store, Topic
from forebay.topic.store import open_store as open  # noqa: A004  # the public name
from forebay.wal.checkpoints import CheckpointStore
from forebay.wal.log import Wal
from forebay.wal.retention import Deleter
from forebay.wal.watermarks import Watermarks

__all__ = [
    "CheckpointStore",
    "Deleter",
    "DeleterSettings",
    "ForebayError",
    "MessageId",
    "StartPosition",
    "Store",
    "StoreSettings",
    "StreamMessage",
    "Topic",
    "Wal",
    "WalSettings",
    "WalStorage",
    "WalStorageFactory",
    "Watermarks",
    "open",
]
