"""Names of Danube's configuration, and earlier names of ours, that are accepted for ours.

Each alias is moved to its proper key before the settings are made. It keeps its line, so that
errors name the key that was written. An alias together with its proper key is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from forebay.config.document import Items, Node, Table, Text, Where, as_table
from forebay.config.quantities import HOURS, MEGABYTES, Unit
from forebay.errors import InvalidSetting


@dataclass(frozen=True, slots=True)
class Alias:
    old: str
    new: str
    unit: Unit | None = None
    """The unit of a plain number, if it is not that of the proper name."""


TOP_LEVEL: Final = Alias("wal_cloud", "storage")
ALIASES: Final = (
    Alias("storage.wal.file_sync.interval_ms", "storage.wal.fsync_interval_ms"),
    Alias("storage.wal.file_sync.max_batch_bytes", "storage.wal.fsync_max_batch_bytes"),
    Alias("storage.wal.rotation.max_bytes", "storage.wal.rotate_max_bytes"),
    Alias("storage.wal.rotation.max_hours", "storage.wal.rotate_max_seconds", HOURS),
    Alias("storage.wal.retention.check_interval_minutes", "storage.deleter.check_interval_minutes"),
    Alias("storage.wal.retention.time_minutes", "storage.deleter.retention_time_minutes"),
    Alias("storage.wal.retention.size_mb", "storage.deleter.retention_size_mb"),
    Alias("storage.uploader.max_object_mb", "storage.uploader.max_object_bytes", MEGABYTES),
    Alias("storage.metadata.etcd_endpoint", "metadata.etcd_endpoint"),
    Alias("metadata.namespace", "metadata.prefix"),
    Alias("storage.uploader.sweep_grace_minutes", "storage.sweeper.grace_minutes"),
)
ETCD_ENDPOINT: Final = Alias("metadata.etcd_endpoint", "metadata.endpoints")
IN_MEMORY: Final = "storage.metadata.in_memory"
GROUPS: Final = (
    "storage.wal.file_sync",
    "storage.wal.rotation",
    "storage.wal.retention",
    "storage.metadata",
)
"""Sections that contain only aliases."""

CLOUD_OPTIONS: Final = (
    "endpoint",
    "region",
    "access_key",
    "secret_key",
    "session_token",
    "profile",
    "role_arn",
    "anonymous",
    "virtual_host_style",
    "project",
    "credentials_json",
    "credentials_path",
    "account_name",
    "account_key",
    "sas_token",
)
"""Options of the store that may be written beside `backend` and `root`."""

BACKENDS: Final = {"azblob": "azure", "local": "fs"}
RANGED_READS: Final = "storage.cloud_reader.enable_ranged_reads"

REFUSED: Final = {
    "cluster_name": "a store has no name; `root_prefix` keeps several of them apart in one etcd",
    "broker_host, broker_port, broker.host, broker.ports": "`broker.listen`",
    "admin_port, prom_port": "`admin.listen`: one HTTP server has the API, the metrics and a page",
    "meta_store_host, meta_store_port, meta_store": "`metadata.endpoints`",
    "bootstrap_namespaces": "namespaces are created on first use",
    "auto_create_topics": "`broker.auto_create_topics`",
    "auth": "`token`, `cert_file` and `key_file` of `broker` and of `admin`",
    "policies": "the limits and the redelivery settings of `broker`",
    "load_manager": "there is one broker",
    "storage.mode, storage.local_wal_root, storage.durable, storage.metadata_prefix, "
    "storage.local_retention, storage.wal.advanced": "the layout of Danube 0.6 and later: "
    "`storage.wal.dir`, `storage.cloud`, `metadata.prefix`, `storage.deleter`, `storage.wal`",
}
"""Keys of Danube's file that are refused, and what to use. For the documentation only."""


def names_below(section: str) -> list[str]:
    """The aliases in a section, to find the name that an unknown key resembles."""
    olds = [TOP_LEVEL.old, ETCD_ENDPOINT.old, RANGED_READS, IN_MEMORY, *GROUPS]
    olds += [alias.old for alias in ALIASES]
    olds += [f"storage.cloud.{name}" for name in CLOUD_OPTIONS]
    parts = (old.rpartition(".") for old in olds)
    return [name for parent, _, name in parts if parent == section]


def resolve(root: Table) -> None:
    """Moves all aliases to their proper keys."""
    if (storage := root.items.pop(TOP_LEVEL.old, None)) is not None:
        _place(root, TOP_LEVEL.new, storage)
    for alias in ALIASES:
        node = _take(root, alias.old)
        if node is not None:
            if isinstance(node, Text):
                node.unit = alias.unit
            _place(root, alias.new, node)
    _resolve_only(root, IN_MEMORY, flag=False, why="a catalog in memory would be lost")
    for group in GROUPS:
        _drop_empty(root, group)
    _resolve_cloud(root)
    _resolve_etcd(root)
    _resolve_only(
        root,
        RANGED_READS,
        flag=True,
        why="objects are always read by ranges of fetch_chunk_size, never whole",
    )


def _find(root: Table, path: str) -> Node | None:
    node: Node | None = root
    for name in path.split("."):
        node = node.items.get(name) if isinstance(node, Table) else None
    return node


def _take(root: Table, path: str) -> Node | None:
    parent, _, name = path.rpartition(".")
    table = _find(root, parent)
    return table.items.pop(name, None) if isinstance(table, Table) else None


def _place(root: Table, path: str, node: Node) -> None:
    *sections, name = path.split(".")
    table = root
    for section in sections:
        below = table.items.get(section)
        table.items[section] = as_table(below) if below is not None else Table(node.where)
        table = as_table(table.items[section])
    there = table.items.get(name)
    if there is not None:
        raise InvalidSetting(
            f"{node.where}: the same as {there.where.path} in line {there.where.line}; keep one"
        )
    table.items[name] = node


def _drop_empty(root: Table, path: str) -> None:
    """Removes a group whose keys were all moved; one with other keys is refused later."""
    node = _find(root, path)
    if node is not None and not as_table(node).items:
        _take(root, path)


def _resolve_cloud(root: Table) -> None:
    for name in CLOUD_OPTIONS:
        node = _take(root, f"storage.cloud.{name}")
        if node is not None:
            _place(root, f"storage.cloud.options.{name}", node)
    backend = _find(root, "storage.cloud.backend")
    if isinstance(backend, Text):
        backend.text = BACKENDS.get(backend.text, backend.text)


def _resolve_etcd(root: Table) -> None:
    endpoint = _take(root, ETCD_ENDPOINT.old)
    if endpoint is None:
        return
    _place(root, ETCD_ENDPOINT.new, Items(endpoint.where, [endpoint]))
    backend = _find(root, "metadata.backend")
    if backend is None:
        where = Where(endpoint.where.file, endpoint.where.line, "metadata.backend")
        _place(root, "metadata.backend", Text(where, "etcd", plain=True))
    elif isinstance(backend, Text) and backend.text != "etcd":
        raise InvalidSetting(f"{endpoint.where} is for etcd, but {backend.where.path} is {backend}")


def _resolve_only(root: Table, path: str, *, flag: bool, why: str) -> None:
    """Removes a flag that has one possible value; refuses the other one."""
    node = _take(root, path)
    if node is None:
        return
    spellings = {"true", "yes", "on"} if flag else {"false", "no", "off"}
    if not isinstance(node, Text) or node.text.lower() not in spellings:
        only = "true" if flag else "false"
        raise InvalidSetting(f"{node.where} is {node}; it can only be {only}: {why}")
