"""A topic's own settings: which there are, how they are parsed, and which values are in effect.

A topic can have its own values for some keys of the configuration file. They are kept in the
catalog, by the names in `TOPIC_KEYS`. Their texts are parsed as those of the file, and checked by
the same settings classes. To make another setting one of a topic's own, add it to `TOPIC_KEYS`.

Beware: null is a value, such as "no limit". A key without a value of its own is *unset*, and the
store's setting applies.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from types import MappingProxyType
from typing import Any, Final, Literal, TypeAlias

from forebay.config.load import SECTIONS, Key, keys_of, parse_value
from forebay.config.offload_policies import Policies, require_below_retention, values_of
from forebay.config.reference import format_value
from forebay.errors import InvalidSetting
from forebay.settings import StoreSettings

Values: TypeAlias = Mapping[str, Any]
"""A topic's own values by key: texts, numbers, booleans and None."""
Source: TypeAlias = Literal["default", "configuration", "namespace", "topic"]

TOPIC_KEYS: Final[Mapping[str, tuple[str, str]]] = {
    "rotate_max_bytes": ("wal", "rotate_max_bytes"),
    "rotate_max_seconds": ("wal", "rotate_max_seconds"),
    "rolling": ("uploader", "rolling"),
    "max_object_bytes": ("uploader", "max_object_bytes"),
    "max_object_messages": ("uploader", "max_object_messages"),
    "max_open_seconds": ("uploader", "max_open_seconds"),
    "max_idle_seconds": ("uploader", "max_idle_seconds"),
    "format": ("uploader", "format"),
    "ledger_block_bytes": ("uploader", "ledger_block_bytes"),
    "offload_threshold_bytes": ("uploader", "offload_threshold_bytes"),
    "offload_threshold_seconds": ("uploader", "offload_threshold_seconds"),
    "compression": ("uploader", "compression"),
    "compression_level": ("uploader", "compression_level"),
    "retention_time_minutes": ("deleter", "retention_time_minutes"),
    "retention_size_mb": ("deleter", "retention_size_mb"),
    "deletion_lag_minutes": ("deleter", "deletion_lag_minutes"),
    "remote_retention_time_minutes": ("remote_retention", "time_minutes"),
    "remote_retention_size_mb": ("remote_retention", "size_mb"),
    "remote_retention_keep_unread": ("remote_retention", "keep_unread"),
    "subscription_start": ("broker", "subscription_start"),
    "max_unacked_messages": ("broker", "max_unacked_messages"),
    "ack_timeout_ms": ("broker", "ack_timeout_ms"),
    "redelivery_delay_ms": ("broker", "redelivery_delay_ms"),
    "redelivery_delay_max_ms": ("broker", "redelivery_delay_max_ms"),
    "max_redeliveries": ("broker", "max_redeliveries"),
    "poison": ("broker", "poison"),
    "dead_letter_topic": ("broker", "dead_letter_topic"),
    "on_lost": ("broker", "on_lost"),
}
"""For each key, the section (a field of StoreSettings) and the field that it sets."""

OFFLOAD_POLICIES: Final = "offload_policies"
"""The key of a topic's offload policies that are none of these settings; see
`forebay.config.offload_policies`. It is not shown among the settings."""

_OFFLOADING: Final = frozenset(
    {
        "offload_threshold_bytes",
        "offload_threshold_seconds",
        "retention_time_minutes",
        "retention_size_mb",
        "remote_retention_time_minutes",
        "remote_retention_size_mb",
    }
)
"""Settings of which some must be lower than others."""
_CLASSES: Final = {path[-1]: kind for path, kind in SECTIONS.items()}


@dataclass(frozen=True, slots=True)
class TopicSetting:
    """One setting of a topic, as it is in effect."""

    key: str
    value: Any
    """In the unit that the key ends with."""
    source: Source
    """`configuration` is a value of the store that is not the default, and `namespace` one of the
    offload policies of the topic's namespace."""
    known: bool = True
    """False: a later release has set it, and this one ignores it."""

    @property
    def shown(self) -> str:
        """The value as a configuration file has it, such as `64MiB`."""
        if self.key not in TOPIC_KEYS:
            return json.dumps(self.value)
        try:
            return format_value(_key(self.key), self.value)
        except (TypeError, ValueError):  # a value that this release does not accept
            return json.dumps(self.value)


def parse_changes(values: Mapping[str, object]) -> dict[str, Any]:
    """Parses new values of a topic: texts as in a configuration file, numbers, booleans and None.

    Raises InvalidSetting for an unknown key, with the nearest known one, and for a wrong value.
    """
    return {name: _parsed(name, value) for name, value in values.items()}


def changed(
    settings: StoreSettings,
    before: Values,
    values: Values,
    unset: Iterable[str],
    policies: Policies = MappingProxyType({}),
) -> Values:
    """Returns a topic's own values after a change. `values` are parsed.

    `policies` are those of the topic's namespace.

    `unset` may name keys that this release does not know, if the topic has them. Raises
    InvalidSetting for other unknown keys, for a key that is both set and unset, and for values that
    the settings refuse.
    """
    after = {**before, **values}
    names = list(unset)
    for name in names:
        if name not in TOPIC_KEYS and name not in before:
            raise _unknown(name)
        if name in values:
            raise InvalidSetting(f"{name} is both set and unset; choose one")
        after.pop(name, None)
    found = effective(settings, {**values_of(policies), **after})
    # Only then: what others have changed since must not make it impossible to change anything.
    if _OFFLOADING.intersection([*values, *names]):
        require_below_retention(found)
    return after


def effective(settings: StoreSettings, values: Values) -> StoreSettings:
    """Returns the store's settings with a topic's own values in place of some of them.

    Keys that this release does not know are ignored. Raises InvalidSetting for a wrong value.
    """
    by_section: dict[str, dict[str, Any]] = {}
    for name, (section, field) in TOPIC_KEYS.items():
        if name in values:
            by_section.setdefault(section, {})[field] = values[name]
    for section, fields in by_section.items():
        try:
            changed_section = replace(getattr(settings, section), **fields)
        except InvalidSetting as error:
            raise InvalidSetting(_renamed(section, str(error))) from None
        settings = replace(settings, **{section: changed_section})
    return settings


def in_effect(
    settings: StoreSettings, values: Values, policies: Policies = MappingProxyType({})
) -> list[TopicSetting]:
    """Returns every setting that a topic can have, with its value and where that comes from.

    `policies` are those of the topic's namespace. Values of keys that this release does not know
    come last. Wrong values are returned as they are.
    """
    try:
        inherited = values_of(policies)
    except InvalidSetting:  # of a later release; `effective_settings` refuses them
        inherited = {}
    found: list[TopicSetting] = []
    for name, (section, field) in TOPIC_KEYS.items():
        value = getattr(getattr(settings, section), field)
        source: Source = "default" if value == _key(name).default else "configuration"
        if name in values:
            value, source = values[name], "topic"
        elif name in inherited:
            value, source = inherited[name], "namespace"
        found.append(TopicSetting(name, value, source))
    unknown = sorted(values.keys() - TOPIC_KEYS.keys() - {OFFLOAD_POLICIES})
    return [*found, *(TopicSetting(name, values[name], "topic", known=False) for name in unknown)]


def differing(store: StoreSettings, topic: StoreSettings) -> dict[str, str]:
    """Returns the values of a topic, as text, that are not those of the store."""
    found: dict[str, str] = {}
    for name, (section, field) in TOPIC_KEYS.items():
        value = getattr(getattr(topic, section), field)
        if value != getattr(getattr(store, section), field):
            found[name] = format_value(_key(name), value)
    return found


@cache
def _key(name: str) -> Key:
    section, field = TOPIC_KEYS[name]
    return keys_of(_CLASSES[section])[field]


def _parsed(name: str, value: object) -> Any:
    if name not in TOPIC_KEYS:
        raise _unknown(name)
    if isinstance(value, bool):
        value = "true" if value else "false"
    elif value is None:
        value = "null"
    elif isinstance(value, int | float):
        value = repr(value)
    key = _key(name)
    if not isinstance(value, str):
        raise InvalidSetting(f"{name} is a {type(value).__name__}; it must be {key.allowed}")
    return parse_value(name, value, key)


def _unknown(name: str) -> InvalidSetting:
    near = get_close_matches(name, TOPIC_KEYS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(TOPIC_KEYS)}"
    return InvalidSetting(f"{name[:100]!r} is not a setting of a topic; {hint}")


def _renamed(section: str, message: str) -> str:
    """The message of a settings class, with a topic's name for the field."""
    field, space, rest = message.partition(" ")
    names = {place: name for name, place in TOPIC_KEYS.items()}
    return names.get((section, field), field) + space + rest
