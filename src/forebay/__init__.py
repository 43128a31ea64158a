"""Forebay: a tiered log store.

Every topic is one append-only log. `forebay.open` opens a store and is the usual way in:

    with forebay.open("data/") as store:
        offset = store.topic("orders").append(b"...", durability="synced")

The names below are imported when they are first used, so that the command line starts quickly.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"  # pyproject.toml takes the version of the package from this line

if TYPE_CHECKING:
    from forebay.broker.client import connect, connect_async
    from forebay.catalog.catalog import Catalog
    from forebay.catalog.connect import EtcdMetadata
    from forebay.errors import ForebayError
    from forebay.format.descriptor import ObjectDescriptor
    from forebay.format.message import MessageId, StreamMessage
    from forebay.objects.store import CloudStore
    from forebay.pulsar.offloader import LedgerOffloader
    from forebay.read.cloud_reader import CloudReader
    from forebay.settings import (
        CloudReaderSettings,
        CloudSettings,
        DeleterSettings,
        MetadataSettings,
        RemoteRetentionSettings,
        StoreSettings,
        UploaderSettings,
        WalSettings,
    )
    from forebay.topic.factory import WalStorageFactory
    from forebay.topic.storage import PersistentStorage, StartPosition, WalStorage
    from forebay.topic.store import Store, Topic
    from forebay.topic.store import open_store as open  # noqa: A004  # the public name
    from forebay.upload.uploader import Uploader
    from forebay.wal.checkpoints import CheckpointStore
    from forebay.wal.log import Wal
    from forebay.wal.retention import Deleter
    from forebay.wal.watermarks import Watermarks

__all__ = [
    "Catalog",
    "CheckpointStore",
    "CloudReader",
    "CloudReaderSettings",
    "CloudSettings",
    "CloudStore",
    "Deleter",
    "DeleterSettings",
    "EtcdMetadata",
    "ForebayError",
    "LedgerOffloader",
    "MessageId",
    "MetadataSettings",
    "ObjectDescriptor",
    "PersistentStorage",
    "RemoteRetentionSettings",
    "StartPosition",
    "Store",
    "StoreSettings",
    "StreamMessage",
    "Topic",
    "Uploader",
    "UploaderSettings",
    "Wal",
    "WalSettings",
    "WalStorage",
    "WalStorageFactory",
    "Watermarks",
    "connect",
    "connect_async",
    "open",
]

_PLACES = {
    "Catalog": "catalog.catalog",
    "CheckpointStore": "wal.checkpoints",
    "CloudReader": "read.cloud_reader",
    "CloudReaderSettings": "settings",
    "CloudSettings": "settings",
    "CloudStore": "objects.store",
    "Deleter": "wal.retention",
    "DeleterSettings": "settings",
    "EtcdMetadata": "catalog.connect",
    "ForebayError": "errors",
    "LedgerOffloader": "pulsar.offloader",
    "MessageId": "format.message",
    "MetadataSettings": "settings",
    "ObjectDescriptor": "format.descriptor",
    "PersistentStorage": "topic.storage",
    "RemoteRetentionSettings": "settings",
    "StartPosition": "topic.storage",
    "Store": "topic.store",
    "StoreSettings": "settings",
    "StreamMessage": "format.message",
    "Topic": "topic.store",
    "Uploader": "upload.uploader",
    "UploaderSettings": "settings",
    "Wal": "wal.log",
    "WalSettings": "settings",
    "WalStorage": "topic.storage",
    "WalStorageFactory": "topic.factory",
    "Watermarks": "wal.watermarks",
    "connect": "broker.client",
    "connect_async": "broker.client",
    "open": "topic.store",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'forebay' has no attribute {name!r}")
    module = import_module(f"forebay.{_PLACES[name]}")
    found = globals()[name] = getattr(module, "open_store" if name == "open" else name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
