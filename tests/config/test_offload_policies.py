"""Pulsar's offload policies: what is refused, what they set, and how levels are merged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.config import parse_config
from forebay.config.offload_policies import (
    BLOCK_BYTES,
    DELETION_LAG,
    DRIVER,
    DRIVERS,
    READ_PRIORITY,
    THRESHOLD_BYTES,
    THRESHOLD_SECONDS,
    Thresholds,
    fields_of,
    merged,
    parse_policies,
    require_below_retention,
    store_policies,
    thresholds,
    values_of,
)
from forebay.config.topics import TOPIC_KEYS, changed, effective, in_effect
from forebay.errors import InvalidSetting
from forebay.limits import GIB, MIB
from forebay.settings import (
    CloudSettings,
    DeleterSettings,
    RemoteRetentionSettings,
    StoreSettings,
    UploaderSettings,
)

STORE = StoreSettings(data=None)
PLACE = {DRIVER: "aws-s3", "managedLedgerOffloadBucket": "b"}

SENT_BY_THE_CLIENT = {
    "offloadersDirectory": "./offloaders",
    "managedLedgerOffloadDriver": "aws-s3",
    "managedLedgerOffloadMaxThreads": 2,
    "managedLedgerOffloadPrefetchRounds": 1,
    "managedLedgerOffloadThresholdInSeconds": 10800,
    "managedLedgerOffloadThresholdInBytes": 10485760,
    "managedLedgerOffloadDeletionLagInMillis": 14400000,
    "managedLedgerOffloadedReadPriority": "TIERED_STORAGE_FIRST",
    "s3ManagedLedgerOffloadRegion": "eu-west-1",
    "s3ManagedLedgerOffloadBucket": "ledgers",
    "s3ManagedLedgerOffloadMaxBlockSizeInBytes": 67108864,
    "s3ManagedLedgerOffloadReadBufferSizeInBytes": 1048576,
    "s3ManagedLedgerOffloadRoleSessionName": "pulsar-s3-offload",
    "gcsManagedLedgerOffloadMaxBlockSizeInBytes": 67108864,
    "gcsManagedLedgerOffloadReadBufferSizeInBytes": 1048576,
    "managedLedgerOffloadBucket": "ledgers",
    "managedLedgerOffloadRegion": "eu-west-1",
}
COMPUTED = {"s3Driver": True, "gcsDriver": False, "fileSystemDriver": False}
"""What the client's serializer adds."""


def test_what_pulsars_command_sends_is_kept_field_by_field() -> None:
    sent = {**SENT_BY_THE_CLIENT, **COMPUTED, "s3ManagedLedgerOffloadRole": None}
    assert parse_policies(sent) == SENT_BY_THE_CLIENT


@pytest.mark.parametrize("driver", [*DRIVERS, "AWS-S3", "Filesystem", "s3"])
def test_pulsars_drivers_are_accepted_in_letters_of_either_case(driver: str) -> None:
    found = parse_policies({**PLACE, DRIVER: driver})
    assert found[DRIVER] == driver


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (None, "must be a JSON object"),
        ([], "must be a JSON object"),
        ({}, "is None, which is not supported"),
        ({DRIVER: ""}, "is '', which is not supported"),
        ({DRIVER: "tape", "managedLedgerOffloadBucket": "b"}, "is 'tape', which is not supported"),
        ({DRIVER: 7}, f"{DRIVER} must be a text"),
        ({DRIVER: "aws-s3"}, "or s3ManagedLedgerOffloadBucket"),
        ({DRIVER: "aws-s3", "managedLedgerOffloadBucket": ""}, "the bucket must be given"),
        ({DRIVER: "aws-s3", "gcsManagedLedgerOffloadBucket": "b"}, "the bucket must be given"),
        ({DRIVER: "google-cloud-storage"}, "or gcsManagedLedgerOffloadBucket"),
        ({DRIVER: "azureblob", "s3ManagedLedgerOffloadBucket": "b"}, "the bucket must be given"),
        ({**PLACE, THRESHOLD_BYTES: "10M"}, f"{THRESHOLD_BYTES} is str"),
        ({**PLACE, THRESHOLD_BYTES: True}, f"{THRESHOLD_BYTES} is True"),
        ({**PLACE, THRESHOLD_BYTES: 2**63}, "a whole number"),
        ({**PLACE, THRESHOLD_SECONDS: 1.5}, f"{THRESHOLD_SECONDS} is 1.5"),
        ({**PLACE, "managedLedgerOffloadMaxThreads": 0}, "MaxThreads is 0"),
        ({**PLACE, "s3ManagedLedgerOffloadMaxBlockSizeInBytes": 5 * MIB - 1}, "5242880 to"),
        ({**PLACE, READ_PRIORITY: "newest"}, "must be one of"),
        ({**PLACE, READ_PRIORITY: ["x"]}, "must be one of"),
        ({**PLACE, "fileSystemURI": "x" * 2000}, "at most 1024 bytes"),
        ({**PLACE, "managedLedgerExtraConfigurations": [1]}, "must be an object"),
        ({**PLACE, "managedLedgerExtraConfigurations": {"a": 1}}, "must be a text"),
        (
            {**PLACE, "managedLedgerExtraConfigurations": {str(at): "" for at in range(65)}},
            "at most 64 fields",
        ),
    ],
)
def test_what_pulsar_would_refuse_is_refused(body: object, told: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        parse_policies(body)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    "secret",
    [
        {"s3ManagedLedgerOffloadCredentialId": "hunter2"},
        {"s3ManagedLedgerOffloadCredentialSecret": "hunter2"},
        {"managedLedgerOffloadServiceEndpoint": "http://me:hunter2@store:9000"},
        {"managedLedgerExtraConfigurations": {"secretKey": "hunter2"}},
        {"managedLedgerExtraConfigurations": {"endpoint": "http://me:hunter2@store"}},
    ],
)
def test_credentials_are_refused_and_not_repeated(secret: dict[str, Any]) -> None:
    with pytest.raises(InvalidSetting, match="credentials") as caught:
        parse_policies({**PLACE, **secret})
    assert "hunter2" not in str(caught.value)


def test_the_read_priority_is_taken_in_both_spellings() -> None:
    found = parse_policies({**PLACE, READ_PRIORITY: "bookkeeper-first"})
    assert found[READ_PRIORITY] == "BOOKKEEPER_FIRST"


# ---- as settings ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        (THRESHOLD_BYTES, 10, {"offload_threshold_bytes": 10}),
        (THRESHOLD_BYTES, 0, {"offload_threshold_bytes": 0}),
        (THRESHOLD_BYTES, -1, {}),
        (THRESHOLD_BYTES, -2, {"offload_threshold_bytes": None}),
        (THRESHOLD_SECONDS, 10, {"offload_threshold_seconds": 10}),
        (THRESHOLD_SECONDS, -1, {}),
        (THRESHOLD_SECONDS, -(2**63), {"offload_threshold_seconds": None}),
        (DELETION_LAG, 0, {"deletion_lag_minutes": 0}),
        (DELETION_LAG, 90_000, {"deletion_lag_minutes": 1.5}),
        (DELETION_LAG, -1, {"deletion_lag_minutes": None}),
        (DELETION_LAG, None, {}),
        (BLOCK_BYTES, 32 * MIB, {"ledger_block_bytes": 32 * MIB}),
    ],
)
def test_a_field_is_a_setting_of_a_topic(field: str, value: int | None, expected: object) -> None:
    assert values_of({field: value}) == expected


NUMBERS = st.fixed_dictionaries(
    {},
    optional={
        THRESHOLD_BYTES: st.integers(-5, 10**12),
        THRESHOLD_SECONDS: st.integers(-5, 10**8),
        DELETION_LAG: st.integers(-5, 10**11),
        BLOCK_BYTES: st.integers(5 * MIB, GIB),
    },
)


@given(NUMBERS)
def test_fields_that_become_settings_come_back_with_the_same_meaning(
    policies: dict[str, int],
) -> None:
    values = values_of(policies)
    effective(STORE, values)  # accepted by the settings classes
    assert values.keys() <= TOPIC_KEYS.keys()
    back = fields_of(values)
    assert values_of(back) == values
    for name, value in policies.items():
        if value >= 0:
            assert back[name] == value


@given(NUMBERS, NUMBERS, NUMBERS)
def test_each_field_comes_from_the_first_level_that_has_it(
    topic: dict[str, int], namespace: dict[str, int], store: dict[str, int]
) -> None:
    store = {name: value for name, value in store.items() if value != -1}
    found = merged(topic, namespace, store)
    for name in (THRESHOLD_BYTES, THRESHOLD_SECONDS, DELETION_LAG, BLOCK_BYTES):
        unset = -1 if name in {THRESHOLD_BYTES, THRESHOLD_SECONDS} else None
        levels = [level[name] for level in (topic, namespace, store) if name in level]
        said = [value for value in levels if value != unset]
        assert found.get(name) == (said[0] if said else None)
    # The same as settings, one level over the other.
    one_by_one = effective(
        effective(effective(STORE, values_of(store)), values_of(namespace)), values_of(topic)
    )
    assert effective(STORE, values_of(found)) == one_by_one


def test_what_the_store_does_is_shown_as_policies() -> None:
    assert store_policies(STORE) == {
        DRIVER: "filesystem",
        THRESHOLD_BYTES: 0,
        THRESHOLD_SECONDS: -2,
        DELETION_LAG: 14_400_000,
        BLOCK_BYTES: 64 * MIB,
    }
    cloud = CloudSettings(backend="s3", root="s3://ledgers/prod")
    found = store_policies(replace(STORE, cloud=cloud))
    assert (found[DRIVER], found["managedLedgerOffloadBucket"]) == ("aws-s3", "ledgers")


def test_a_setting_of_a_topic_says_that_its_namespace_has_it() -> None:
    policies = {THRESHOLD_BYTES: 7 * MIB, DELETION_LAG: -1}
    found = {each.key: each for each in in_effect(STORE, {"deletion_lag_minutes": 3}, policies)}
    assert (found["offload_threshold_bytes"].shown, found["offload_threshold_bytes"].source) == (
        "7MiB",
        "namespace",
    )
    assert (found["deletion_lag_minutes"].value, found["deletion_lag_minutes"].source) == (
        3,
        "topic",
    )
    assert found["offload_threshold_seconds"].source == "default"


def test_policies_kept_for_a_topic_are_not_among_its_settings() -> None:
    found = in_effect(STORE, {"offload_policies": {DRIVER: "aws-s3"}})
    assert [each.key for each in found] == list(TOPIC_KEYS)


# ---- retention --------------------------------------------------------------------------------

RETAINED = StoreSettings(
    data=None,
    deleter=DeleterSettings(retention_time_minutes=10, retention_size_mb=5),
    remote_retention=RemoteRetentionSettings(time_minutes=5, size_mb=3),
)


def with_thresholds(size: int | None, age: float | None) -> StoreSettings:
    uploader = UploaderSettings(offload_threshold_bytes=size, offload_threshold_seconds=age)
    return replace(RETAINED, uploader=uploader)


@pytest.mark.parametrize(
    ("size", "age", "rule"),
    [
        (3 * MIB, None, "remote_retention.size_mb"),
        (5 * MIB, None, "retention_size_mb"),
        (None, 300, "remote_retention.time_minutes"),
        (None, 600, "retention_time_minutes"),
    ],
)
def test_a_threshold_that_retention_would_reach_first_is_refused(
    size: int | None, age: float | None, rule: str
) -> None:
    with pytest.raises(InvalidSetting, match=f"lower than {rule}"):
        require_below_retention(with_thresholds(size, age))


@pytest.mark.parametrize(("size", "age"), [(None, None), (3 * MIB - 1, 299), (0, 0)])
def test_a_threshold_below_retention_is_accepted(size: int | None, age: float | None) -> None:
    settings = with_thresholds(size, age)
    require_below_retention(settings)
    assert thresholds(settings) == Thresholds(size, age)


def test_zero_is_below_any_retention() -> None:
    none_is_kept = DeleterSettings(retention_time_minutes=0, retention_size_mb=0)
    require_below_retention(replace(with_thresholds(0, 0), deleter=none_is_kept))


def test_retention_without_a_limit_allows_any_threshold() -> None:
    unlimited = DeleterSettings(retention_time_minutes=None, retention_size_mb=None)
    huge = UploaderSettings(offload_threshold_bytes=2**62, offload_threshold_seconds=10**8)
    require_below_retention(StoreSettings(data=None, deleter=unlimited, uploader=huge))


def test_a_configuration_file_is_held_to_it() -> None:
    text = "storage: {uploader: {offload_threshold_seconds: 2d}}"
    with pytest.raises(InvalidSetting, match="configuration: offload_threshold_seconds is 172800"):
        parse_config(text, base=Path("/"))


def test_a_change_of_a_topics_settings_is_held_to_it_with_the_namespaces_policies() -> None:
    with pytest.raises(InvalidSetting, match="lower than retention_time_minutes"):
        changed(STORE, {}, {"offload_threshold_seconds": 86_400}, ())
    policies = {THRESHOLD_SECONDS: 7200}
    with pytest.raises(InvalidSetting, match="retention_time_minutes, which is 60 minutes"):
        changed(STORE, {}, {"retention_time_minutes": 60}, (), policies)
    # What is in contradiction already does not stop other changes.
    before = {"retention_time_minutes": 60}
    after = changed(STORE, before, {"max_open_seconds": 1}, (), policies)
    assert after == {**before, "max_open_seconds": 1}
