"""Settings: frozen data, one class for each component, checked when they are created.

Names and defaults are those of the configuration file; the text below each field is its meaning in
docs/guide/configuration.md. Byte and time bounds are in the unit that the name ends with, and an
`mb` is 1024 * 1024 bytes. Secrets are in no repr and in no error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from forebay.errors import InvalidSetting
from forebay.limits import (
    BACKGROUND_THREADS_MAX,
    FETCH_THREADS,
    GIB,
    INTERVAL_SECONDS_MAX,
    KIB,
    MIB,
    OFFSET_MAX,
    OFFSETS_RESERVED,
    PART_BYTES_MIN,
    READ_AHEAD_CHUNKS,
    UPLOAD_THREADS,
    WRITER_THREADS,
    WRITER_THREADS_MAX,
)

__all__ = [
    "AdminSettings",
    "BrokerSettings",
    "CloudReaderSettings",
    "CloudSettings",
    "DeleterSettings",
    "MetadataSettings",
    "RemoteRetentionSettings",
    "ServerAddress",
    "SparkSettings",
    "StoreSettings",
    "UploaderSettings",
    "WalSettings",
]

_TOKEN: Final = re.compile(r"[A-Za-z0-9\-._~+/=]{1,4096}")
_MASTER: Final = re.compile(
    r"local(\[[\w*, ]+\])?|local-cluster\[[\d, ]+\]|spark://\S+|yarn|k8s://\S+", re.ASCII
)
_SECRET: Final = re.compile(
    r"secret|passw|passphrase|token|credential|signature|(access|account|private|shared)key"
    r"|(?<![a-z])(key|sas|sig|pwd)(?![a-z])",
    re.IGNORECASE,
)
_SCHEMES: Final = {
    "s3": ("s3", "s3a"),
    "gcs": ("gs", "gcs"),
    "azure": ("azure", "az", "azblob", "abfs", "abfss"),
    "fs": ("file",),
    "memory": ("memory",),
}
"""What a root starts with, for each backend; other schemes are the backend's own business."""


@dataclass(frozen=True, slots=True)
class WalSettings:
    """One topic's write-ahead log."""

    dir: Path | str | None = None
    """The topic's own directory; None keeps everything in memory, up to the cache's bounds."""
    file_name: str = "wal.log"
    """Of the first segment; a later one has its number in it, such as `wal.7.log`."""
    cache_capacity: int = 1024
    """Messages kept in memory for readers after they are synced."""
    cache_max_bytes: int = 16 * MIB
    """Of those messages together, whichever bound is met first."""
    queue_max_bytes: int = 32 * MIB
    """Bytes appended and not yet synced; an append that finds them used up waits."""
    fsync_interval_ms: int = 5000
    """The longest that an append nobody waits for stays unsynced."""
    fsync_max_batch_bytes: int = 10 * MIB
    """Unsynced bytes that start a sync before that interval is over."""
    rotate_max_bytes: int | None = 64 * MIB
    """How large a segment gets; None sets no bound."""
    rotate_max_seconds: float | None = 3600
    """How long a segment is written to; None sets no bound."""

    def __post_init__(self) -> None:
        as_path(self, "dir")
        require_type(self, "file_name", str)
        require(self, "cache_capacity", "cache_max_bytes", least=0, whole=True)
        require(self, "queue_max_bytes", "fsync_max_batch_bytes", least=1, whole=True)
        require(self, "rotate_max_bytes", least=1, whole=True, optional=True)
        require(self, "fsync_interval_ms", least=1, most=INTERVAL_SECONDS_MAX * 1000, whole=True)
        require(self, "rotate_max_seconds", least=0.001, most=INTERVAL_SECONDS_MAX, optional=True)


@dataclass(frozen=True, slots=True)
class DeleterSettings:
    """Retention of local segments; None switches a rule off."""

    check_interval_minutes: float = 5
    """Between two passes over a topic."""
    retention_time_minutes: float | None = 1440
    """How long a segment stays after its last message."""
    retention_size_mb: float | None = 10240
    """How much of a topic stays; what is over goes, oldest first, whatever its age."""
    deletion_lag_minutes: float = 240
    """How long a segment stays after the objects that hold it were made."""

    def __post_init__(self) -> None:
        require(self, "retention_time_minutes", "retention_size_mb", least=0, optional=True)
        require(self, "deletion_lag_minutes", least=0, most=INTERVAL_SECONDS_MAX / 60)
        require(self, "check_interval_minutes", least=0.01, most=INTERVAL_SECONDS_MAX / 60)


@dataclass(frozen=True, slots=True)
class UploaderSettings:
    """From segments to objects."""

    enabled: bool = True
    """Whether topics are uploaded in the background."""
    runner: Literal["inline", "spark"] = "inline"
    """Who uploads: threads of this process, or the Spark pipeline, which leaves them idle."""
    interval_seconds: float = 300
    """Between two cycles of a topic; the first one comes at start."""
    root_prefix: str = "/forebay"
    """What the catalog's keys start with."""
    max_object_bytes: int = 1 * GIB
    """How large an object gets."""
    max_object_messages: int | None = None
    """How many messages an object gets; None sets no bound."""
    rolling: bool = False
    """One writer held open across cycles, instead of an object written in one go."""
    max_open_seconds: float = 600
    """The longest that a synced message waits for its upload to begin, the interval aside."""
    max_idle_seconds: float | None = None
    """A rolling object ends when nothing was appended for so long; None waits on."""
    stream_chunk_size: int = 8 * MIB
    """Of one part of an upload."""
    concurrent_parts: int = 4
    """In flight, for each object being written."""
    concurrent_topics: int = UPLOAD_THREADS
    """Topics that are uploaded at the same time."""
    verify_after_upload: bool = True
    """Reads every object back before it counts; else its size and etag are compared."""
    sidecars: bool = True
    """A small copy of the descriptor beside each object, for a restore from the bucket alone."""
    sweep_grace_minutes: float = 1440
    """How old an object that no descriptor names must be before a sweep removes it."""

    def __post_init__(self) -> None:
        require_type(self, "enabled", bool)
        require_type(self, "rolling", bool)
        require_type(self, "verify_after_upload", bool)
        require_type(self, "sidecars", bool)
        require_type(self, "root_prefix", str)
        require_choice(self, "runner", ("inline", "spark"))
        most = INTERVAL_SECONDS_MAX
        require(self, "interval_seconds", least=0.01, most=most)
        require(self, "max_open_seconds", least=0, most=most)
        require(self, "max_idle_seconds", least=0, most=most, optional=True)
        require(self, "sweep_grace_minutes", least=0, most=most / 60)
        require(self, "max_object_bytes", least=1, whole=True)
        require(self, "max_object_messages", least=1, whole=True, optional=True)
        require(self, "stream_chunk_size", least=PART_BYTES_MIN, most=GIB, whole=True)
        require(self, "concurrent_parts", least=1, most=64, whole=True)
        require(self, "concurrent_topics", least=1, most=BACKGROUND_THREADS_MAX, whole=True)


@dataclass(frozen=True, slots=True)
class CloudSettings:
    """Where objects are."""

    backend: Literal["fs", "memory", "s3", "gcs", "azure"] = "fs"
    """The kind of store; `fs` is a directory, `memory` is for tests."""
    root: str | None = None
    """`s3://bucket/prefix`, `gs://bucket/prefix`, `azure://container/prefix`, or a directory;
    None is `<data>/objects`."""
    options: Mapping[str, str] = field(default_factory=dict, repr=False)
    """What the backend needs to know; the rest comes from the environment. s3: endpoint, region,
    access_key, secret_key, session_token, virtual_host_style, anonymous. gcs: endpoint,
    credentials_path, anonymous. azure: endpoint, account_name, account_key, sas_token, anonymous.
    """
    request_timeout_seconds: float = 60
    """For one request, such as one part of an upload."""
    retry_timeout_seconds: float = 120
    """How long one request is tried again."""
    max_retries: int = 8
    """How often one request is tried again, within that time."""

    def __post_init__(self) -> None:
        require_choice(self, "backend", ("fs", "memory", "s3", "gcs", "azure"))
        require_type(self, "root", str, optional=True)
        self._require_root()
        as_options(self, "options")
        require(self, "request_timeout_seconds", least=0.05, most=86400)
        require(self, "retry_timeout_seconds", least=0, most=86400)
        require(self, "max_retries", least=0, most=1000, whole=True)

    def _require_root(self) -> None:
        if self.root is None:
            return
        if holds_password(self.root):
            raise InvalidSetting("root is a URL with a password; credentials belong into options")
        scheme, separator, _ = self.root.partition("://")
        for backend, schemes in _SCHEMES.items():
            if separator and scheme in schemes and backend != self.backend:
                raise InvalidSetting(
                    f"root is {self.root!r}, of backend {backend}; backend is {self.backend!r}"
                )


@dataclass(frozen=True, slots=True)
class CloudReaderSettings:
    """From objects to readers."""

    fetch_chunk_size: int = 4 * MIB
    """Of one request."""
    read_ahead_chunks: int = READ_AHEAD_CHUNKS
    """Chunks that one reader fetches ahead; 0 fetches one at a time."""
    fetch_threads: int = FETCH_THREADS
    """Requests in flight, of all readers together."""
    lenient: bool = False
    """Whether readers step over damaged frames, with a warning, instead of raising."""

    def __post_init__(self) -> None:
        require(self, "fetch_chunk_size", least=64 * KIB, most=GIB, whole=True)
        require(self, "read_ahead_chunks", least=0, most=1024, whole=True)
        require(self, "fetch_threads", least=1, most=BACKGROUND_THREADS_MAX, whole=True)
        require_type(self, "lenient", bool)


@dataclass(frozen=True, slots=True)
class RemoteRetentionSettings:
    """Retention of objects; None, the default, keeps them for ever."""

    time_minutes: float | None = None
    """How long an object stays after it was made."""
    size_mb: float | None = None
    """How much of a topic stays; whole objects that are over go, oldest first."""

    def __post_init__(self) -> None:
        require(self, "time_minutes", "size_mb", least=0, optional=True)


@dataclass(frozen=True, slots=True)
class MetadataSettings:
    """Where the catalog is."""

    backend: Literal["sqlite", "etcd"] = "sqlite"
    """A file for one machine, or a cluster."""
    path: Path | str | None = None
    """Of SQLite's file; None is `<data>/catalog.db`."""
    endpoints: Sequence[str] = ()
    """Of etcd, such as `127.0.0.1:2379`."""
    prefix: str | None = None
    """What the catalog's keys start with; None leaves it to `uploader.root_prefix`."""
    username: str | None = None
    """Of etcd's authentication; None asks for none."""
    password: str | None = field(default=None, repr=False)
    """Of that user."""
    ca_file: Path | str | None = None
    """Certificates that etcd's own is checked with; giving one switches TLS on."""
    cert_file: Path | str | None = None
    """This client's certificate."""
    key_file: Path | str | None = None
    """The private key of that certificate."""
    timeout_seconds: float = 5
    """For one request."""
    lease_seconds: float = 15
    """How long a topic stays owned by a process that says nothing more."""
    lease_margin_seconds: float = 3
    """An owner stops acknowledging so long before its lease ends."""
    offsets_reserved: int = OFFSETS_RESERVED
    """Offsets that the owner of a topic reserves at a time."""

    def __post_init__(self) -> None:
        require_choice(self, "backend", ("sqlite", "etcd"))
        for name in ("path", "ca_file", "cert_file", "key_file"):
            as_path(self, name)
        self._require_endpoints()
        for name in ("prefix", "username", "password"):
            require_type(self, name, str, optional=True)
        require(self, "timeout_seconds", least=0.05, most=3600)
        require(self, "lease_seconds", least=0.5, most=86400)
        require(self, "lease_margin_seconds", least=0.05, most=86400)
        if self.lease_margin_seconds * 2 > self.lease_seconds:
            raise InvalidSetting(
                f"lease_margin_seconds is {self.lease_margin_seconds}; it must be at most half of "
                f"lease_seconds, {self.lease_seconds}"
            )
        require(self, "offsets_reserved", least=1, most=10**12, whole=True)

    def _require_endpoints(self) -> None:
        value = self.endpoints
        if isinstance(value, str) or not isinstance(value, list | tuple):
            raise InvalidSetting(f"endpoints is {value!r}; it must be a list of host:port")
        if not all(isinstance(each, str) and each for each in value):
            raise InvalidSetting(f"endpoints is {value!r}; it must be a list of host:port")
        if any(holds_password(each) for each in value):
            raise InvalidSetting("endpoints is a URL with a password; use username and password")
        object.__setattr__(self, "endpoints", tuple(value))
        if self.backend == "etcd" and not value:
            raise InvalidSetting("endpoints is empty; etcd needs at least one host:port")


@dataclass(frozen=True, slots=True)
class BrokerSettings:
    """The gRPC server, which is to come: nothing listens there yet."""

    listen: str = "127.0.0.1:6650"
    """The address that clients connect to; port 0 takes a free one."""
    ack: Literal["buffered", "synced", "uploaded"] = "synced"
    """How far a message has to get before its producer is told that it is stored."""

    def __post_init__(self) -> None:
        require_address(self, "listen")
        require_choice(self, "ack", ("buffered", "synced", "uploaded"))


@dataclass(frozen=True, slots=True)
class AdminSettings:
    """The HTTP server: REST, metrics, dashboard."""

    listen: str = "127.0.0.1:8650"
    """The address that browsers connect to; port 0 takes a free one. One that other machines
    reach needs a `token`."""
    url: str | None = None
    """What other machines call it, such as `https://forebay.internal:8650`; None is made of
    `listen`."""
    token: str | None = field(default=None, repr=False)
    """What requests have to bring as `Authorization: Bearer`; None asks for nothing."""
    cert_file: Path | str | None = None
    """The certificate chain of the server; giving one switches TLS on."""
    key_file: Path | str | None = None
    """The private key of that certificate."""
    ca_file: Path | str | None = None
    """Certificates that clients of this server check its own with; None is the system's."""
    request_bytes_max: int = 16 * MIB
    """Of one request's body."""
    request_messages_max: int = 10_000
    """Of one request."""
    pending_bytes_max: int = 64 * MIB
    """Bodies of all requests that are under way; what is over waits."""
    streams_max: int = 64
    """Readers of messages at a time; what is over is refused."""

    def __post_init__(self) -> None:
        require_address(self, "listen")
        for name in ("url", "token"):
            require_type(self, name, str, optional=True)
        if self.token is not None and not _TOKEN.fullmatch(self.token):
            raise InvalidSetting(
                "token is empty, or has characters that no header can carry; it must be letters, "
                "digits and -._~+/= (leave it out to ask for none)"
            )
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise InvalidSetting(f"url is {self.url!r}; it must begin with http:// or https://")
        if self.url is not None and holds_password(self.url):
            raise InvalidSetting("url has a password in it; use token")
        for name in ("cert_file", "key_file", "ca_file"):
            as_path(self, name)
        if (self.cert_file is None) != (self.key_file is None):
            raise InvalidSetting("cert_file and key_file go together: give both, or neither")
        require(self, "request_bytes_max", least=64 * KIB, most=GIB, whole=True)
        require(self, "request_messages_max", least=1, most=1_000_000, whole=True)
        require(self, "pending_bytes_max", least=64 * KIB, most=64 * GIB, whole=True)
        require(self, "streams_max", least=1, most=100_000, whole=True)
        if self.pending_bytes_max < self.request_bytes_max:
            raise InvalidSetting(
                f"pending_bytes_max is {self.pending_bytes_max}; it must be at least "
                f"request_bytes_max, {self.request_bytes_max}"
            )


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """A running server, as other processes of the same store reach it."""

    url: str
    instance: str | None = None
    """Which run of the server it is; None where it was named by hand."""
    token: str | None = field(default=None, repr=False)
    ca_file: Path | str | None = None
    store: str | None = None
    """Which store it has to be of; None where nobody has asked yet."""


@dataclass(frozen=True, slots=True)
class SparkSettings:
    """The Spark session of the pipeline and the jobs."""

    master: str = "local[*,4]"
    """Where it runs; `local[*]` alone never tries a failed task again."""
    options: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Spark's own settings, such as `spark.executor.memory: 4g`."""

    def __post_init__(self) -> None:
        require_type(self, "master", str)
        if not _MASTER.fullmatch(self.master):
            raise InvalidSetting(
                f"master is {self.master!r}; it must be local[...], spark://host:port, yarn or "
                "k8s://..."
            )
        as_options(self, "options")


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """A whole store: where it is, and how each part of it behaves."""

    data: Path | str | None
    """The data directory, for everything that has no place of its own; None is memory only."""
    wal: WalSettings = field(default_factory=WalSettings)
    """For every topic; its `dir` is ignored in favour of `<wal_root>/<namespace>/<topic>`."""
    uploader: UploaderSettings = field(default_factory=UploaderSettings)
    cloud: CloudSettings = field(default_factory=CloudSettings)
    cloud_reader: CloudReaderSettings = field(default_factory=CloudReaderSettings)
    remote_retention: RemoteRetentionSettings = field(default_factory=RemoteRetentionSettings)
    deleter: DeleterSettings = field(default_factory=DeleterSettings)
    metadata: MetadataSettings = field(default_factory=MetadataSettings)
    writer_threads: int = WRITER_THREADS
    """Threads that all topics share for writing and syncing."""
    wal_root: Path | str | None = None
    """The directory of all topics' directories; None is `<data>/wal`."""
    broker: BrokerSettings = field(default_factory=BrokerSettings)
    admin: AdminSettings = field(default_factory=AdminSettings)
    spark: SparkSettings = field(default_factory=SparkSettings)
    server: ServerAddress | None = None
    """The server that owns the topics now, where one runs; found, never configured."""

    def __post_init__(self) -> None:
        as_path(self, "data")
        as_path(self, "wal_root")
        if self.data is None and self.wal_root is not None:
            raise InvalidSetting(
                f"wal_root is {str(self.wal_root)!r}; a store in memory (data is None) has none"
            )
        require_type(self, "wal", WalSettings)
        require_type(self, "uploader", UploaderSettings)
        require_type(self, "cloud", CloudSettings)
        require_type(self, "cloud_reader", CloudReaderSettings)
        require_type(self, "remote_retention", RemoteRetentionSettings)
        require_type(self, "deleter", DeleterSettings)
        require_type(self, "metadata", MetadataSettings)
        require_type(self, "broker", BrokerSettings)
        require_type(self, "admin", AdminSettings)
        require_type(self, "spark", SparkSettings)
        require(self, "writer_threads", least=1, most=WRITER_THREADS_MAX, whole=True)


# ---- checks ----
#
# Each takes the owner and the names of its fields. All raise InvalidSetting with a message that
# starts with the field's name: the loader of configuration files puts the file, the line and the
# section before it.


def is_secret(name: str) -> bool:
    """Whether the value of a setting of that name is kept from errors, logs and dumps.

    Names of files are not secret, what is in them is: `key_file` is shown.
    """
    return _SECRET.search(name) is not None and not name.lower().endswith(("file", "path"))


def _shown(name: str, value: object) -> str:
    return "***" if is_secret(name) else repr(value)


def require(
    owner: object,
    *names: str,
    least: float,
    most: float = OFFSET_MAX,
    whole: bool = False,
    optional: bool = False,
) -> None:
    """InvalidSetting unless each is a number in `least..most`, or None where that is allowed."""
    kind = "whole number" if whole else "number"
    for name in names:
        value = getattr(owner, name)
        if optional and value is None:
            continue
        right = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
        if not right or not least <= value <= most:  # which refuses nan too
            raise InvalidSetting(
                f"{name} is {value!r}; it must be a {kind} of at least {least} and at most {most}"
            )


def as_path(owner: object, name: str) -> None:
    """Makes the setting a Path where it is a str; InvalidSetting where it is neither nor None."""
    value = getattr(owner, name)
    if isinstance(value, str) and value and "\0" not in value:
        object.__setattr__(owner, name, Path(value))
    elif value is not None and not isinstance(value, Path):
        raise InvalidSetting(f"{name} is {value!r}; it must be a path, or None")


def require_type(owner: object, name: str, kind: type, *, optional: bool = False) -> None:
    value = getattr(owner, name)
    if not isinstance(value, kind) and not (optional and value is None):
        raise InvalidSetting(f"{name} is {_shown(name, value)}; it must be a {kind.__name__}")


def require_choice(owner: object, name: str, choices: tuple[str, ...]) -> None:
    value = getattr(owner, name)
    if value not in choices:
        raise InvalidSetting(f"{name} is {value!r}; it must be one of {', '.join(choices)}")


def as_options(owner: object, name: str) -> None:
    """Makes the setting a dict of its own; InvalidSetting unless it maps text to text."""
    value = getattr(owner, name)
    if not isinstance(value, Mapping) or not all(
        isinstance(key, str) and isinstance(each, str) for key, each in value.items()
    ):
        raise InvalidSetting(f"{name} is not a mapping of text to text")
    object.__setattr__(owner, name, dict(value))


def require_address(owner: object, name: str) -> None:
    value = getattr(owner, name)
    host, colon, port = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    digits = port.isascii() and port.isdigit() and len(port) <= 5
    if not (host and colon and digits and int(port) < 65536):
        raise InvalidSetting(f"{name} is {value!r}; it must be host:port, such as 127.0.0.1:8650")


def holds_password(url: str) -> bool:
    """Whether it is `scheme://user:password@...`."""
    return re.search(r"://[^/@]*:[^/]*@", url) is not None
