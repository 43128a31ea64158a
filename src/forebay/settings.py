"""Settings: frozen data classes, one for each component, checked when they are created.

Names and defaults are those of the configuration file. The text below each field is its description
in docs/guide/configuration.md, which `forebay config reference` generates from this file. Sizes and
times are in the unit that the name ends with; an `mb` is 1024 * 1024 bytes. A wrong value raises
InvalidSetting. No repr and no error contains a secret.
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
    LEDGER_BLOCK_BYTES_MIN,
    MIB,
    OBJECT_BYTES_MAX,
    OBJECT_INDEX_BYTES,
    OBJECT_INDEX_MESSAGES,
    OBJECT_PARTS_MAX,
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
    "SweeperSettings",
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
_LEDGER_GROWTH_MAX: Final = 16
"""How many times larger than the frames a ledger of very small messages may be, with room."""
_SCHEMES: Final = {
    "s3": ("s3", "s3a"),
    "gcs": ("gs", "gcs"),
    "azure": ("azure", "az", "azblob", "abfs", "abfss"),
    "fs": ("file",),
    "memory": ("memory",),
}
"""The schemes of a root, by backend; other schemes are left for the backend to check."""


@dataclass(frozen=True, slots=True)
class WalSettings:
    """The write-ahead log of each topic."""

    dir: Path | str | None = None
    """The topic's own directory; None keeps the log in memory, within the limits of the cache."""
    file_name: str = "wal.log"
    """The name of the first segment; later ones get a number, such as `wal.7.log`."""
    cache_capacity: int = 1024
    """Synced messages kept in memory for readers."""
    cache_max_bytes: int = 16 * MIB
    """Bytes of synced messages kept in memory; the limit that is reached first applies."""
    queue_max_bytes: int = 32 * MIB
    """The most bytes that are appended and not synced yet; further appends wait."""
    fsync_interval_ms: int = 5000
    """The longest time until an append is synced if nobody waits for it."""
    fsync_max_batch_bytes: int = 10 * MIB
    """Unsynced bytes that start a sync before the interval has passed."""
    rotate_max_bytes: int | None = 64 * MIB
    """The size at which a new segment is begun; None sets no limit."""
    rotate_max_seconds: float | None = 3600
    """The age at which a new segment is begun; None sets no limit."""

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
    """Retention of local segments that are uploaded; None switches a rule off."""

    check_interval_minutes: float = 5
    """The time between two passes over a topic."""
    retention_time_minutes: float | None = 1440
    """How long a segment is kept after its last message."""
    retention_size_mb: float | None = 10240
    """How much of a topic is kept; beyond that the oldest segments are deleted, of any age."""
    deletion_lag_minutes: float | None = 240
    """How long a segment is kept after its objects were created; None keeps it for ever."""

    def __post_init__(self) -> None:
        require(self, "retention_time_minutes", "retention_size_mb", least=0, optional=True)
        most = INTERVAL_SECONDS_MAX / 60
        require(self, "deletion_lag_minutes", least=0, most=most, optional=True)
        require(self, "check_interval_minutes", least=0.01, most=INTERVAL_SECONDS_MAX / 60)


@dataclass(frozen=True, slots=True)
class UploaderSettings:
    """The uploader, which copies segments to objects."""

    enabled: bool = True
    """Whether topics are uploaded in the background."""
    runner: Literal["inline", "spark"] = "inline"
    """What uploads: `inline` are threads of this process, `spark` is the Spark pipeline. Threads of
    the owner upload topics that are `rolling`, in both cases."""
    interval_seconds: float = 300
    """The time between two upload cycles of a topic; the first begins at start."""
    root_prefix: str = "/forebay"
    """The prefix of the catalog's keys."""
    max_object_bytes: int | None = 1 * GIB
    """The largest size of an object, before compression. None sets no limit but that of the stores:
    9,900 parts of `stream_chunk_size`, and 5 TiB; it applies to larger values too."""
    max_object_messages: int | None = None
    """The most messages in an object; None sets no limit."""
    rolling: bool = False
    """Whether an object is written across several cycles, instead of within one. The owner of the
    topic writes it, with either `runner`."""
    max_open_seconds: float | None = 600
    """The longest time until the upload of a synced message begins, besides the interval. None
    sets no limit: messages wait until an object is full."""
    max_idle_seconds: float | None = None
    """A rolling object is completed when nothing was appended for this long; None sets no limit."""
    offload_threshold_bytes: int | None = 0
    """How many bytes of a topic of ledgers may stay without being uploaded, as Pulsar counts them:
    every sealed segment beyond it is uploaded, and so is the one that crosses it. 0 uploads a
    segment as soon as it is sealed. None sets no limit."""
    offload_threshold_seconds: float | None = None
    """How long a segment of a topic of ledgers may be sealed without being uploaded. None sets no
    limit."""
    max_batch_bytes: int | None = None
    """The most bytes that one cycle of a topic uploads, before other topics get their turn; the
    topic goes on after them, without waiting for the interval. An object that is not rolling is not
    larger either. None sets no limit."""
    index_every_messages: int = OBJECT_INDEX_MESSAGES
    """An object's index gets an entry after this many messages, or after `index_every_bytes`."""
    index_every_bytes: int = OBJECT_INDEX_BYTES
    """An object's index gets an entry after this many bytes. Beyond 4,096 entries the interval
    doubles."""
    format: Literal["dnb1", "pulsar"] = "dnb1"
    """What new objects are: `dnb1` are frames, and `pulsar` are ledgers that brokers of Pulsar can
    read. A ledger holds whole sealed segments, unless a limit cuts it."""
    ledger_block_bytes: int = 64 * MIB
    """The size of the blocks of a ledger. Pulsar itself writes none below 5 MiB. A message that is
    larger makes the blocks of its ledger larger."""
    compression: Literal["none", "zstd"] = "none"
    """How new objects are compressed; Danube reads only those of `none`."""
    compression_level: int = 3
    """The level of `zstd`: 1 is the fastest, 19 the smallest."""
    stream_chunk_size: int = 8 * MIB
    """The size of one part of an upload."""
    concurrent_parts: int = 4
    """Parts in flight for each object that is being written."""
    concurrent_topics: int = UPLOAD_THREADS
    """Topics that are uploaded at the same time."""
    verify_after_upload: bool = True
    """Whether objects are read back before they count; otherwise only size and etag are checked."""
    sidecars: bool = True
    """Whether each object gets a copy of its descriptor, for a restore without the catalog."""

    def __post_init__(self) -> None:
        require_type(self, "enabled", bool)
        require_type(self, "rolling", bool)
        require_type(self, "verify_after_upload", bool)
        require_type(self, "sidecars", bool)
        require_type(self, "root_prefix", str)
        require_choice(self, "runner", ("inline", "spark"))
        require_choice(self, "compression", ("none", "zstd"))
        require_choice(self, "format", ("dnb1", "pulsar"))
        require(self, "ledger_block_bytes", least=LEDGER_BLOCK_BYTES_MIN, most=GIB, whole=True)
        require(self, "compression_level", least=1, most=19, whole=True)
        self._require_plain_ledgers()
        most = INTERVAL_SECONDS_MAX
        require(self, "interval_seconds", least=0.01, most=most)
        require(self, "max_open_seconds", "max_idle_seconds", least=0, most=most, optional=True)
        for name in ("max_object_bytes", "max_object_messages", "max_batch_bytes"):
            require(self, name, least=1, whole=True, optional=True)
        require(self, "offload_threshold_bytes", least=0, whole=True, optional=True)
        require(self, "offload_threshold_seconds", least=0, most=most, optional=True)
        require(self, "index_every_messages", "index_every_bytes", least=1, whole=True)
        require(self, "stream_chunk_size", least=PART_BYTES_MIN, most=GIB, whole=True)
        require(self, "concurrent_parts", least=1, most=64, whole=True)
        require(self, "concurrent_topics", least=1, most=BACKGROUND_THREADS_MAX, whole=True)

    def _require_plain_ledgers(self) -> None:
        """Refuses what ledgers cannot have: they are written at once, in Pulsar's own format."""
        if self.format != "pulsar":
            return
        if self.compression != "none":
            raise InvalidSetting(
                f"compression is {self.compression!r}, but objects of the format 'pulsar' are not "
                "compressed; set it to 'none'"
            )
        if self.rolling:
            raise InvalidSetting(
                "rolling is true, but objects of the format 'pulsar' hold sealed segments, which "
                "are uploaded at once; set it to false"
            )

    @property
    def ledgers(self) -> bool:
        """Whether new objects are ledgers of Pulsar."""
        return self.format == "pulsar"

    @property
    def by_owner(self) -> bool:
        """Whether a topic's owner uploads it. Only an owner can keep a rolling object open."""
        return self.enabled and (self.runner == "inline" or self.rolling)

    @property
    def object_bytes_max(self) -> int:
        """The largest size of an object: `max_object_bytes`, within the limits of the stores.

        It counts bytes of frames. An entry of a ledger has up to some hundred bytes more.
        """
        most = self.stored_bytes_max // (_LEDGER_GROWTH_MAX if self.ledgers else 1)
        return most if self.max_object_bytes is None else min(self.max_object_bytes, most)

    @property
    def stored_bytes_max(self) -> int:
        """The largest size that all stores take, in parts of `stream_chunk_size`."""
        return min(OBJECT_PARTS_MAX * self.stream_chunk_size, OBJECT_BYTES_MAX)


@dataclass(frozen=True, slots=True)
class SweeperSettings:
    """Removing what interrupted uploads, compactions and sinks left in the object store."""

    enabled: bool = True
    """Whether the background work sweeps; `forebay sweep` does it at any time."""
    interval_minutes: float = 60
    """The time between two sweeps of a store, however many processes have it open."""
    grace_minutes: float = 1440
    """The age at which an object that the catalog does not know, or that a compaction replaced, is
    removed."""

    def __post_init__(self) -> None:
        require_type(self, "enabled", bool)
        require(self, "interval_minutes", least=0.01, most=INTERVAL_SECONDS_MAX / 60)
        require(self, "grace_minutes", least=0, most=INTERVAL_SECONDS_MAX / 60)


@dataclass(frozen=True, slots=True)
class CloudSettings:
    """The object store."""

    backend: Literal["fs", "memory", "s3", "gcs", "azure"] = "fs"
    """The kind of store; `fs` is a directory, `memory` is for tests."""
    root: str | None = None
    """`s3://bucket/prefix`, `gs://bucket/prefix`, `azure://container/prefix`, or a directory;
    None is `<data>/objects`."""
    options: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Options of the backend; what is not given comes from the environment, or from the identity of
    the machine (see [below](#credentials-of-the-store)). s3: endpoint, region, access_key,
    secret_key, session_token, profile, role_arn, virtual_host_style, anonymous. gcs: endpoint,
    project, credentials_path, credentials_json, anonymous. azure: endpoint, account_name,
    account_key, sas_token, anonymous."""
    request_timeout_seconds: float = 60
    """The timeout of one request, such as one part of an upload."""
    retry_timeout_seconds: float = 120
    """How long one request is retried."""
    max_retries: int = 8
    """How often one request is retried within that time."""

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
            raise InvalidSetting("root is a URL with a password; put credentials into options")
        scheme, separator, _ = self.root.partition("://")
        for backend, schemes in _SCHEMES.items():
            if separator and scheme in schemes and backend != self.backend:
                raise InvalidSetting(
                    f"root is {self.root!r}, which needs backend {backend!r}; it is "
                    f"{self.backend!r}"
                )


@dataclass(frozen=True, slots=True)
class CloudReaderSettings:
    """Reading from objects."""

    fetch_chunk_size: int = 4 * MIB
    """How much one request fetches."""
    read_ahead_chunks: int = READ_AHEAD_CHUNKS
    """Chunks that one reader fetches ahead; 0 fetches one at a time."""
    fetch_threads: int = FETCH_THREADS
    """Requests in flight for all readers together."""
    lenient: bool = False
    """Whether readers skip damaged frames with a warning, instead of raising an error."""

    def __post_init__(self) -> None:
        require(self, "fetch_chunk_size", least=64 * KIB, most=GIB, whole=True)
        require(self, "read_ahead_chunks", least=0, most=1024, whole=True)
        require(self, "fetch_threads", least=1, most=BACKGROUND_THREADS_MAX, whole=True)
        require_type(self, "lenient", bool)


@dataclass(frozen=True, slots=True)
class RemoteRetentionSettings:
    """Retention of objects; None, the default, keeps them for ever."""

    time_minutes: float | None = None
    """How long an object is kept after it was created."""
    size_mb: float | None = None
    """How much of a topic is kept; beyond that the oldest objects are deleted."""
    keep_unread: bool = False
    """Whether objects stay, beyond both, that have messages which a subscription has not
    acknowledged, as the catalog has it. A subscription that nobody uses then keeps objects for
    ever: delete it."""

    def __post_init__(self) -> None:
        require(self, "time_minutes", "size_mb", least=0, optional=True)
        require_type(self, "keep_unread", bool)


@dataclass(frozen=True, slots=True)
class MetadataSettings:
    """The catalog."""

    backend: Literal["sqlite", "etcd"] = "sqlite"
    """`sqlite` is a file for one machine, `etcd` a cluster."""
    path: Path | str | None = None
    """SQLite's file; None is `<data>/catalog.db`."""
    endpoints: Sequence[str] = ()
    """The members of the etcd cluster, such as `127.0.0.1:2379`."""
    prefix: str | None = None
    """The prefix of the catalog's keys; None uses `uploader.root_prefix`."""
    username: str | None = None
    """The etcd user; None uses no authentication."""
    password: str | None = field(default=None, repr=False)
    """The password of the etcd user."""
    ca_file: Path | str | None = None
    """The CA certificates that etcd's certificate is checked with; switches TLS on."""
    cert_file: Path | str | None = None
    """The client certificate for etcd."""
    key_file: Path | str | None = None
    """The private key of the client certificate."""
    timeout_seconds: float = 5
    """The timeout of one request."""
    lease_seconds: float = 15
    """How long a topic stays owned by a process that no longer renews its lease."""
    lease_margin_seconds: float = 3
    """How long before its lease ends an owner stops acknowledging appends."""
    offsets_reserved: int = OFFSETS_RESERVED
    """Offsets that the owner of a topic reserves at a time."""
    progress_flush_interval_seconds: float = 5
    """How long what consumers acknowledged may be in memory only before the catalog gets it."""
    progress_min_offset_delta: int = 1
    """Acknowledged offsets below which the catalog gets them only when the topic is closed."""

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
        most = INTERVAL_SECONDS_MAX
        require(self, "progress_flush_interval_seconds", least=0.01, most=most)
        require(self, "progress_min_offset_delta", least=1, whole=True)

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
    """The gRPC server, which speaks the protocol of Danube's clients."""

    enabled: bool = True
    """Whether `up` and `serve` start it."""
    listen: str = "127.0.0.1:6650"
    """The address that clients connect to; port 0 takes a free one. An address that other machines
    can reach needs a `token`."""
    url: str | None = None
    """The address that clients are told to connect to, such as `forebay.internal:6650`; None
    derives it from `listen`."""
    token: str | None = field(default=None, repr=False)
    """The token that calls must send as `authorization: Bearer`; None requires none."""
    cert_file: Path | str | None = None
    """The certificate chain of the server; switches TLS on."""
    key_file: Path | str | None = None
    """The private key of that certificate."""
    ack: Literal["buffered", "synced", "uploaded"] = "synced"
    """The stage that a message must reach before it is acknowledged to its producer. With
    `buffered`, subscriptions deliver it before it is synced, too."""
    auto_create_topics: bool = True
    """Whether a producer creates a topic that does not exist."""
    message_bytes_max: int = 4 * MIB
    """The largest message with all its fields. Danube's Python client cannot receive larger ones
    than 4 MiB."""
    pending_bytes_max: int = 64 * MIB
    """The most bytes of messages that wait to be acknowledged to their producers; producers are
    asked to send again later beyond it."""
    subscription_start: Literal["latest", "earliest"] = "latest"
    """Where a new subscription begins."""
    max_unacked_messages: int = 100
    """How many messages a consumer gets before it must acknowledge one."""
    ack_timeout_ms: int | None = 60_000
    """A message that is not acknowledged after this time is delivered again; null never does."""
    redelivery_delay_ms: int = 1000
    """The delay before a message is delivered again, after a time-out or a nack without a delay. It
    doubles each time."""
    redelivery_delay_max_ms: int = 60_000
    """The longest such delay."""
    max_redeliveries: int | None = None
    """How often a message is delivered again after time-outs and nacks; null has no limit."""
    poison: Literal["block", "drop", "dead_letter"] = "block"
    """What happens then: the message stays unacknowledged, or is acknowledged, or is moved to the
    dead-letter topic."""
    dead_letter_topic: str | None = None
    """The topic for such messages; null is the topic's name with `-dead-letters` behind it."""
    on_lost: Literal["skip", "block"] = "skip"
    """Whether a subscription continues after messages that are recorded as lost. It counts them."""

    def __post_init__(self) -> None:
        require_type(self, "enabled", bool)
        require_address(self, "listen")
        require_type(self, "url", str, optional=True)
        if self.url is not None and holds_password(self.url):
            raise InvalidSetting("url has a password in it; use token")
        _require_access(self)
        require_choice(self, "ack", ("buffered", "synced", "uploaded"))
        require_type(self, "auto_create_topics", bool)
        require(self, "message_bytes_max", least=KIB, most=16 * MIB, whole=True)
        require(self, "pending_bytes_max", least=MIB, most=64 * GIB, whole=True)
        if self.pending_bytes_max < self.message_bytes_max:
            raise InvalidSetting(
                f"pending_bytes_max is {self.pending_bytes_max}; it must be at least "
                f"message_bytes_max, {self.message_bytes_max}"
            )
        require_choice(self, "subscription_start", ("latest", "earliest"))
        require(self, "max_unacked_messages", least=1, most=100_000, whole=True)
        most = INTERVAL_SECONDS_MAX * 1000
        require(self, "ack_timeout_ms", least=100, most=most, whole=True, optional=True)
        require(self, "redelivery_delay_ms", least=0, most=most, whole=True)
        require(self, "redelivery_delay_max_ms", least=0, most=most, whole=True)
        if self.redelivery_delay_max_ms < self.redelivery_delay_ms:
            raise InvalidSetting(
                f"redelivery_delay_max_ms is {self.redelivery_delay_max_ms}; it must be at least "
                f"redelivery_delay_ms, {self.redelivery_delay_ms}"
            )
        require(self, "max_redeliveries", least=0, most=1_000_000, whole=True, optional=True)
        require_choice(self, "poison", ("block", "drop", "dead_letter"))
        require_type(self, "dead_letter_topic", str, optional=True)
        require_choice(self, "on_lost", ("skip", "block"))


@dataclass(frozen=True, slots=True)
class AdminSettings:
    """The HTTP server: REST API, metrics and dashboard."""

    listen: str = "127.0.0.1:8650"
    """The address to listen on; port 0 takes a free one. An address that other machines can reach
    needs a `token`."""
    url: str | None = None
    """The URL by which other machines reach the server, such as `https://forebay.internal:8650`;
    None derives it from `listen`."""
    token: str | None = field(default=None, repr=False)
    """The token that requests must send as `Authorization: Bearer`; None requires none."""
    cert_file: Path | str | None = None
    """The certificate chain of the server; switches TLS on."""
    key_file: Path | str | None = None
    """The private key of that certificate."""
    ca_file: Path | str | None = None
    """The CA certificates with which clients check the server's; None uses the system's."""
    request_bytes_max: int = 16 * MIB
    """The largest body of a request, in bytes."""
    request_messages_max: int = 10_000
    """The most messages in a request."""
    pending_bytes_max: int = 64 * MIB
    """The most bytes of bodies of running requests; further requests wait."""
    streams_max: int = 64
    """The most requests that read messages at the same time; further ones are refused."""
    stream_bytes_max: int = 64 * MIB
    """The most bytes that all responses with messages, segments and objects hold together; further
    reads wait for their turn."""

    def __post_init__(self) -> None:
        require_address(self, "listen")
        require_type(self, "url", str, optional=True)
        _require_access(self)
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise InvalidSetting(f"url is {self.url!r}; it must begin with http:// or https://")
        if self.url is not None and holds_password(self.url):
            raise InvalidSetting("url has a password in it; use token")
        as_path(self, "ca_file")
        require(self, "request_bytes_max", least=64 * KIB, most=GIB, whole=True)
        require(self, "request_messages_max", least=1, most=1_000_000, whole=True)
        require(self, "pending_bytes_max", least=64 * KIB, most=64 * GIB, whole=True)
        require(self, "streams_max", least=1, most=100_000, whole=True)
        require(self, "stream_bytes_max", least=4 * MIB, most=64 * GIB, whole=True)
        if self.pending_bytes_max < self.request_bytes_max:
            raise InvalidSetting(
                f"pending_bytes_max is {self.pending_bytes_max}; it must be at least "
                f"request_bytes_max, {self.request_bytes_max}"
            )


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """How other processes of the same store reach a running server."""

    url: str
    instance: str | None = None
    """The id of this run of the server; None if the address was given by hand."""
    token: str | None = field(default=None, repr=False)
    ca_file: Path | str | None = None
    store: str | None = None
    """The id of the store that the server must have; None if it is not known yet."""


@dataclass(frozen=True, slots=True)
class SparkSettings:
    """The Spark session of the pipeline and the jobs."""

    master: str = "local[*,4]"
    """Spark's master URL; plain `local[*]` never retries a failed task."""
    options: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Settings of Spark itself, such as `spark.executor.memory: 4g`."""

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
    """A whole store: its data directory, and the settings of each component."""

    data: Path | str | None
    """The directory of everything without a separate path; None keeps the store in memory."""
    wal: WalSettings = field(default_factory=WalSettings)
    """For every topic; `dir` is ignored, topics are in `<wal_root>/<namespace>/<topic>`."""
    uploader: UploaderSettings = field(default_factory=UploaderSettings)
    cloud: CloudSettings = field(default_factory=CloudSettings)
    cloud_reader: CloudReaderSettings = field(default_factory=CloudReaderSettings)
    remote_retention: RemoteRetentionSettings = field(default_factory=RemoteRetentionSettings)
    deleter: DeleterSettings = field(default_factory=DeleterSettings)
    sweeper: SweeperSettings = field(default_factory=SweeperSettings)
    metadata: MetadataSettings = field(default_factory=MetadataSettings)
    writer_threads: int = WRITER_THREADS
    """Threads that all topics share for writing and syncing."""
    wal_root: Path | str | None = None
    """The directory with the directories of all topics; None is `<data>/wal`."""
    broker: BrokerSettings = field(default_factory=BrokerSettings)
    admin: AdminSettings = field(default_factory=AdminSettings)
    spark: SparkSettings = field(default_factory=SparkSettings)
    server: ServerAddress | None = None
    """The running server that owns the topics, if any; discovered, not configured."""

    def __post_init__(self) -> None:
        as_path(self, "data")
        as_path(self, "wal_root")
        if self.data is None and self.wal_root is not None:
            raise InvalidSetting(
                f"wal_root is {str(self.wal_root)!r}; it must be None for a store in memory (data "
                "is None)"
            )
        require_type(self, "wal", WalSettings)
        require_type(self, "uploader", UploaderSettings)
        require_type(self, "cloud", CloudSettings)
        require_type(self, "cloud_reader", CloudReaderSettings)
        require_type(self, "remote_retention", RemoteRetentionSettings)
        require_type(self, "deleter", DeleterSettings)
        require_type(self, "sweeper", SweeperSettings)
        require_type(self, "metadata", MetadataSettings)
        require_type(self, "broker", BrokerSettings)
        require_type(self, "admin", AdminSettings)
        require_type(self, "spark", SparkSettings)
        require(self, "writer_threads", least=1, most=WRITER_THREADS_MAX, whole=True)


# ---- checks ----
#
# Each takes a settings object and the names of its fields. All raise InvalidSetting with a message
# that starts with the name of the field: the loader of configuration files adds the file, the line
# and the section in front of it.


def is_secret(name: str) -> bool:
    """Whether the value of a setting with that name must not be in errors, logs and dumps.

    The name of a file is not secret, only its contents: `key_file` is shown.
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
    """Raises InvalidSetting unless each field is a number in `least..most`, or None if optional."""
    kind = "whole number" if whole else "number"
    for name in names:
        value = getattr(owner, name)
        if optional and value is None:
            continue
        right = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
        if not right or not least <= value <= most:  # refuses nan too
            raise InvalidSetting(
                f"{name} is {value!r}; it must be a {kind} of at least {least} and at most {most}"
            )


def as_path(owner: object, name: str) -> None:
    """Converts a str to a Path; raises InvalidSetting unless it is a str, a Path or None."""
    value = getattr(owner, name)
    if isinstance(value, str) and value and "\0" not in value:
        object.__setattr__(owner, name, Path(value))
    elif value is not None and not isinstance(value, Path):
        raise InvalidSetting(f"{name} is {value!r}; it must be a path, or None")


def _require_access(server: BrokerSettings | AdminSettings) -> None:
    """Checks the token and the certificate of a server."""
    require_type(server, "token", str, optional=True)
    if server.token is not None and not _TOKEN.fullmatch(server.token):
        raise InvalidSetting(
            "token is empty, too long or has other characters than letters, digits and "
            "-._~+/=; leave it out to require none"
        )
    for name in ("cert_file", "key_file"):
        as_path(server, name)
    if (server.cert_file is None) != (server.key_file is None):
        raise InvalidSetting("cert_file and key_file go together: give both, or neither")


def require_type(owner: object, name: str, kind: type, *, optional: bool = False) -> None:
    value = getattr(owner, name)
    if not isinstance(value, kind) and not (optional and value is None):
        raise InvalidSetting(f"{name} is {_shown(name, value)}; it must be a {kind.__name__}")


def require_choice(owner: object, name: str, choices: tuple[str, ...]) -> None:
    value = getattr(owner, name)
    if value not in choices:
        raise InvalidSetting(f"{name} is {value!r}; it must be one of {', '.join(choices)}")


def as_options(owner: object, name: str) -> None:
    """Copies the mapping; raises InvalidSetting unless it maps strings to strings."""
    value = getattr(owner, name)
    if not isinstance(value, Mapping) or not all(
        isinstance(key, str) and isinstance(each, str) for key, each in value.items()
    ):
        raise InvalidSetting(f"{name} must be a mapping of strings to strings")
    object.__setattr__(owner, name, dict(value))


def require_address(owner: object, name: str) -> None:
    value = getattr(owner, name)
    host, colon, port = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    digits = port.isascii() and port.isdigit() and len(port) <= 5
    if not (host and colon and digits and int(port) < 65536):
        raise InvalidSetting(f"{name} is {value!r}; it must be host:port, such as 127.0.0.1:8650")


def holds_password(url: str) -> bool:
    """Whether the URL has the form `scheme://user:password@...`."""
    return re.search(r"://[^/@]*:[^/]*@", url) is not None
