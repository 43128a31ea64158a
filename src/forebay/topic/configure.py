"""Reads and changes the settings that a topic has of its own, in the catalog.

What the topic has no value for comes from the offload policies of its namespace, and else from the
store. A change needs no ownership: it is a compare-and-set of one row. The topic's owner reads the
rows before each upload and each trim, and the Spark driver before each plan. So a change that
another process made is in effect after the next background cycle, at the latest.

Beware: `effective_settings` raises DescriptorError for a value that this release does not accept.
Nothing is uploaded or deleted then, as it might be against the topic's settings. Appends go on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from forebay.catalog.catalog import Catalog
from forebay.catalog.topic_settings import (
    change_topic_settings,
    read_namespace_policies,
    read_topic_settings,
)
from forebay.config.offload_policies import Policies, values_of
from forebay.config.topics import TopicSetting, changed, effective, in_effect, parse_changes
from forebay.errors import DescriptorError, InvalidSetting
from forebay.format.names import TopicName
from forebay.settings import StoreSettings


def configure_topic(
    catalog: Catalog,
    topic: TopicName,
    settings: StoreSettings,
    values: Mapping[str, object],
    unset: Iterable[str] = (),
) -> list[TopicSetting]:
    """Changes the topic's own settings, and returns all that are in effect then.

    `settings` are those of the store. `values` are texts as in a configuration file, numbers,
    booleans, or None for null. A key in `unset` gets the setting of the namespace or the store
    again. If one of them is wrong, raises InvalidSetting and changes nothing. Raises UnknownTopic
    if the catalog does not have the topic.
    """
    parsed, names = parse_changes(values), list(unset)
    policies = read_namespace_policies(catalog, topic.namespace)
    after = change_topic_settings(
        catalog, topic, lambda before: changed(settings, before, parsed, names, policies)
    )
    return in_effect(settings, after, policies)


def topic_settings(
    catalog: Catalog, topic: TopicName, settings: StoreSettings
) -> list[TopicSetting]:
    """Returns the settings of a topic, with their values and where these come from."""
    policies = read_namespace_policies(catalog, topic.namespace)
    return in_effect(settings, read_topic_settings(catalog, topic), policies)


def effective_settings(
    catalog: Catalog, topic: TopicName, settings: StoreSettings
) -> StoreSettings:
    """Returns the settings of the store with those of the namespace and the topic in place."""
    policies = read_namespace_policies(catalog, topic.namespace)
    return accepted(topic, settings, read_topic_settings(catalog, topic), policies)


def accepted(
    topic: TopicName, settings: StoreSettings, own: Mapping[str, Any], policies: Policies
) -> StoreSettings:
    """Returns the effective settings; DescriptorError if one of them is not accepted.

    `own` are the settings of the topic, and `policies` the offload policies of its namespace.
    """
    try:
        settings = effective(settings, values_of(policies)) if policies else settings
    except InvalidSetting as error:
        raise DescriptorError(
            f"the offload policies of the namespace {topic.namespace}: {error}. Set them again"
        ) from error
    try:
        return effective(settings, own) if own else settings
    except InvalidSetting as error:
        raise DescriptorError(
            f"{topic}: its setting {error}. Change it with `forebay topics configure {topic}`"
        ) from error
