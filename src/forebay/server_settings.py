"""Settings of what stands around a store: its servers, and Spark. Part of `forebay.settings`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from forebay.checks import (
    as_options,
    as_path,
    holds_password,
    require,
    require_address,
    require_choice,
    require_type,
)
from forebay.errors import InvalidSetting
from forebay.limits import GIB, KIB, MIB

_TOKEN: Final = re.compile(r"[A-Za-z0-9\-._~+/=]{1,4096}")
_MASTER: Final = re.compile(
    r"local(\[[\w*, ]+\])?|local-cluster\[[\d, ]+\]|spark://\S+|yarn|k8s://\S+", re.ASCII
)


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
