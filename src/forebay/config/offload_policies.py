"""Pulsar's offload policies: their JSON fields, what is refused, and which settings they set.

A namespace or a topic can have policies. Their names are those of Pulsar's `OffloadPoliciesImpl`.
Four of them have an effect, because they are settings of a topic here: the two thresholds, the
deletion lag and the size of blocks. They are merged field by field: topic, then namespace, then the
store's configuration. The others are checked, kept and shown. Where ledgers are stored, and with
which credentials, is only in the store's configuration: policies with credentials are refused.

Beware: -1 is not a threshold. It means that the next level decides. Another negative number
switches the threshold off. A negative deletion lag never deletes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from forebay.errors import InvalidSetting
from forebay.limits import (
    GIB,
    INTERVAL_SECONDS_MAX,
    MIB,
    OFFLOAD_POLICY_FIELDS_MAX,
    OFFLOAD_POLICY_TEXT_BYTES_MAX,
)
from forebay.settings import StoreSettings, holds_password, is_secret

Policies: TypeAlias = Mapping[str, Any]
"""Fields that are set, by Pulsar's names."""

THRESHOLD_BYTES: Final = "managedLedgerOffloadThresholdInBytes"
THRESHOLD_SECONDS: Final = "managedLedgerOffloadThresholdInSeconds"
DELETION_LAG: Final = "managedLedgerOffloadDeletionLagInMillis"
BLOCK_BYTES: Final = "managedLedgerOffloadMaxBlockSizeInBytes"
DRIVER: Final = "managedLedgerOffloadDriver"
READ_PRIORITY: Final = "managedLedgerOffloadedReadPriority"
EXTRA: Final = "managedLedgerExtraConfigurations"

DRIVERS: Final = ("S3", "aws-s3", "google-cloud-storage", "filesystem", "azureblob", "aliyun-oss")
"""What Pulsar supports; letters of either case."""

_NUMBERS: Final = {
    THRESHOLD_BYTES: (-(2**63), 2**63 - 1),
    THRESHOLD_SECONDS: (-(2**63), int(INTERVAL_SECONDS_MAX)),
    DELETION_LAG: (-(2**63), int(INTERVAL_SECONDS_MAX) * 1000),
    **dict.fromkeys(
        (
            "managedLedgerOffloadMaxThreads",
            "managedLedgerOffloadReadThreads",
            "managedLedgerOffloadPrefetchRounds",
            "s3ManagedLedgerOffloadReadBufferSizeInBytes",
            "gcsManagedLedgerOffloadReadBufferSizeInBytes",
            "managedLedgerOffloadReadBufferSizeInBytes",
        ),
        (1, 2**31 - 1),
    ),
    **dict.fromkeys(
        (
            "s3ManagedLedgerOffloadMaxBlockSizeInBytes",
            "gcsManagedLedgerOffloadMaxBlockSizeInBytes",
        ),
        (5 * MIB, 2**31 - 1),
    ),
    BLOCK_BYTES: (5 * MIB, GIB),
}
_TEXTS: Final = frozenset(
    {
        "offloadersDirectory",
        DRIVER,
        "s3ManagedLedgerOffloadRegion",
        "s3ManagedLedgerOffloadBucket",
        "s3ManagedLedgerOffloadServiceEndpoint",
        "s3ManagedLedgerOffloadRole",
        "s3ManagedLedgerOffloadRoleSessionName",
        "gcsManagedLedgerOffloadRegion",
        "gcsManagedLedgerOffloadBucket",
        "gcsManagedLedgerOffloadServiceAccountKeyFile",
        "fileSystemProfilePath",
        "fileSystemURI",
        "managedLedgerOffloadBucket",
        "managedLedgerOffloadRegion",
        "managedLedgerOffloadServiceEndpoint",
    }
)
_CREDENTIALS: Final = (
    "s3ManagedLedgerOffloadCredentialId",
    "s3ManagedLedgerOffloadCredentialSecret",
)
_PRIORITIES: Final = {
    "TIERED_STORAGE_FIRST": "TIERED_STORAGE_FIRST",
    "tiered-storage-first": "TIERED_STORAGE_FIRST",
    "BOOKKEEPER_FIRST": "BOOKKEEPER_FIRST",
    "bookkeeper-first": "BOOKKEEPER_FIRST",
}
_BUCKETS: Final = {
    "s3": "s3ManagedLedgerOffloadBucket",
    "aws-s3": "s3ManagedLedgerOffloadBucket",
    "google-cloud-storage": "gcsManagedLedgerOffloadBucket",
}
_FORMATS: Final = {"s3": "aws-s3", "gcs": "google-cloud-storage", "azure": "azureblob"}


# ---- from JSON ---------------------------------------------------------------------------------


def parse_policies(body: object) -> dict[str, Any]:
    """Returns the fields that are set in the JSON of policies, checked.

    Fields that are null, or that Pulsar's policies do not have, are left out: a client of another
    release sends more of them. Raises InvalidSetting for a wrong value, for a driver that Pulsar
    does not support, for a missing bucket and for credentials.
    """
    if not isinstance(body, Mapping):
        raise InvalidSetting("the offload policies must be a JSON object")
    found = {
        name: _checked(name, value)
        for name, value in sorted(body.items())
        if value is not None and (name in _KNOWN or name in _CREDENTIALS)
    }
    _require_place(found)
    return found


def parse_policy(name: str, value: object) -> Any:
    """Returns the value of one field, checked; raises InvalidSetting if it is wrong."""
    return _checked(name, value)


_KNOWN: Final = _NUMBERS.keys() | _TEXTS | {READ_PRIORITY, EXTRA}


def _checked(name: str, value: object) -> object:
    if name in _CREDENTIALS:
        raise InvalidSetting(
            f"{name}: policies cannot have credentials, because they are stored and shown. "
            "Configure those of the store (storage.cloud.options, or the environment), and leave "
            "them out here"
        )
    if name in _NUMBERS:
        return _number(name, value)
    if name == READ_PRIORITY:
        if not isinstance(value, str) or value not in _PRIORITIES:
            raise InvalidSetting(f"{name} must be one of TIERED_STORAGE_FIRST, BOOKKEEPER_FIRST")
        return _PRIORITIES[value]
    return _extra(value) if name == EXTRA else _text(name, value)


def _number(name: str, value: object) -> int:
    least, most = _NUMBERS[name]
    if type(value) is not int or not least <= value <= most:
        shown = str(value)[:40] if isinstance(value, int | float) else type(value).__name__
        raise InvalidSetting(f"{name} is {shown}; it must be a whole number, {least} to {most}")
    return value


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or len(value.encode(errors="replace")) > (
        OFFLOAD_POLICY_TEXT_BYTES_MAX
    ):
        raise InvalidSetting(
            f"{name} must be a text of at most {OFFLOAD_POLICY_TEXT_BYTES_MAX} bytes"
        )
    if holds_password(value):
        raise InvalidSetting(f"{name} is a URL with a password; policies cannot have credentials")
    return value


def _extra(value: object) -> dict[str, str]:
    if not isinstance(value, Mapping) or len(value) > OFFLOAD_POLICY_FIELDS_MAX:
        raise InvalidSetting(
            f"{EXTRA} must be an object with at most {OFFLOAD_POLICY_FIELDS_MAX} fields"
        )
    for name in value:
        if is_secret(_text(EXTRA, name)):
            raise InvalidSetting(
                f"{EXTRA} has the field {name!r}: policies cannot have credentials"
            )
    return {name: _text(EXTRA, text) for name, text in sorted(value.items())}


def _require_place(policies: Policies) -> None:
    """Refuses what Pulsar refuses: a driver that it does not know, or one without a bucket."""
    driver = policies.get(DRIVER)
    if not driver or driver.lower() not in {each.lower() for each in DRIVERS}:
        raise InvalidSetting(
            f"{DRIVER} is {driver!r}, which is not supported; it must be one of "
            f"{', '.join(DRIVERS)}"
        )
    own = _BUCKETS.get(driver.lower())
    if driver.lower() == "filesystem" or policies.get("managedLedgerOffloadBucket"):
        return
    if own is None or not policies.get(own):
        raise InvalidSetting(
            f"the bucket must be given for the driver {driver}: managedLedgerOffloadBucket"
            + (f", or {own}" if own else "")
        )


# ---- as settings -------------------------------------------------------------------------------


_THRESHOLDS: Final = {
    THRESHOLD_BYTES: "offload_threshold_bytes",
    THRESHOLD_SECONDS: "offload_threshold_seconds",
}
_LAG_KEY: Final = "deletion_lag_minutes"
_BLOCK_KEY: Final = "ledger_block_bytes"
POLICY_KEYS: Final = frozenset({*_THRESHOLDS.values(), _LAG_KEY, _BLOCK_KEY})
"""The settings of a topic that policies set."""
SETTING_FIELDS: Final = frozenset({*_THRESHOLDS, DELETION_LAG, BLOCK_BYTES})
"""The fields that set them."""


def values_of(policies: Policies) -> dict[str, Any]:
    """Returns the settings of a topic that the policies set, by the names of its settings.

    Raises InvalidSetting if a value is none of those that `parse_policies` returns.
    """
    given = {
        field: _number(field, policies[field])
        for field in SETTING_FIELDS
        if policies.get(field) is not None
    }
    found: dict[str, Any] = {
        name: None if given[field] < 0 else given[field]
        for field, name in _THRESHOLDS.items()
        if given.get(field, -1) != -1
    }
    if DELETION_LAG in given:
        lag_ms = given[DELETION_LAG]
        found[_LAG_KEY] = None if lag_ms < 0 else lag_ms / 60_000
    if BLOCK_BYTES in given:
        found[_BLOCK_KEY] = given[BLOCK_BYTES]
    return found


def fields_of(values: Mapping[str, Any]) -> dict[str, int]:
    """Returns the fields for settings by these names: the reverse of `values_of`.

    A threshold that is switched off is -2, and a lag that never ends is -1.
    """
    found = {
        field: -2 if values[name] is None else int(values[name])
        for field, name in _THRESHOLDS.items()
        if name in values
    }
    if _LAG_KEY in values:
        minutes = values[_LAG_KEY]
        found[DELETION_LAG] = -1 if minutes is None else round(minutes * 60_000)
    if _BLOCK_KEY in values:
        found[BLOCK_BYTES] = values[_BLOCK_KEY]
    return found


def store_policies(settings: StoreSettings) -> dict[str, Any]:
    """Returns the policies that the store's configuration amounts to."""
    driver = _FORMATS.get(settings.cloud.backend, "filesystem")
    found: dict[str, Any] = {DRIVER: driver}
    bucket = (settings.cloud.root or "").partition("://")[2].partition("/")[0]
    if driver != "filesystem" and bucket:
        found["managedLedgerOffloadBucket"] = bucket
    uploader = settings.uploader
    values = {name: getattr(uploader, name) for name in POLICY_KEYS - {_LAG_KEY}}
    values[_LAG_KEY] = settings.deleter.deletion_lag_minutes
    return found | fields_of(values)


def merged(topic: Policies, namespace: Policies, store: Policies) -> dict[str, Any]:
    """Merges policies field by field: the topic's are first, then the namespace's."""
    found = dict(store)
    for level in (namespace, topic):
        found |= {
            name: value
            for name, value in level.items()
            if value is not None and not (name in _THRESHOLDS and value == -1)
        }
    return found


# ---- thresholds --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Thresholds:
    """When closed ledgers are offloaded by themselves. None, or a negative number, is never."""

    size_bytes: int | None = None
    """How much of the topic's newest ledgers may stay without being offloaded."""
    age_seconds: float | None = None
    """How long a ledger may be closed without being offloaded."""

    @property
    def off(self) -> bool:
        """Whether they never offload anything."""
        return not any(
            each is not None and each >= 0 for each in (self.size_bytes, self.age_seconds)
        )


def thresholds(settings: StoreSettings) -> Thresholds:
    """Returns the thresholds of a topic with these settings."""
    uploader = settings.uploader
    return Thresholds(uploader.offload_threshold_bytes, uploader.offload_threshold_seconds)


def require_below_retention(settings: StoreSettings) -> None:
    """Raises InvalidSetting unless ledgers are offloaded before retention may delete them.

    Each threshold must be lower than the retention of local segments and that of objects, as far
    as these are set. 0 always is: the ledger is offloaded as soon as there is one.
    """
    size, age = (
        settings.uploader.offload_threshold_bytes,
        settings.uploader.offload_threshold_seconds,
    )
    local, remote = settings.deleter, settings.remote_retention
    for name, minutes in (
        ("retention_time_minutes", local.retention_time_minutes),
        ("remote_retention.time_minutes", remote.time_minutes),
    ):
        if age and minutes is not None and minutes * 60 <= age:
            raise InvalidSetting(
                f"offload_threshold_seconds is {age:g}; it must be lower than {name}, which is "
                f"{minutes:g} minutes"
            )
    for name, mb in (
        ("retention_size_mb", local.retention_size_mb),
        ("remote_retention.size_mb", remote.size_mb),
    ):
        if size and mb is not None and mb * MIB <= size:
            raise InvalidSetting(
                f"offload_threshold_bytes is {size}; it must be lower than {name}, which is "
                f"{mb:g} MiB"
            )
