"""Reads and changes the settings that a topic has of its own, in the catalog.

They need no ownership: a change is a compare-and-set of one row. The topic's owner reads the row
before each upload and each trim, and the Spark driver before each plan. So a change that another
process made is in effect after the next background cycle, at the latest.

Beware: `effective_settings` raises DescriptorError for a value that this release does not accept.
Nothing is uploaded or deleted then, as it might be against the topic's settings. Appends go on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from forebay.catalog.catalog import Catalog
from forebay.catalog.topic_settings import change_topic_settings, read_topic_settings
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
    booleans, or None for null. A key in `unset` gets the store's setting again. If one of them is
    wrong, raises InvalidSetting and changes nothing. Raises UnknownTopic if the catalog does not
    have the topic.
    """
    parsed, names = parse_changes(values), list(unset)
    after = change_topic_settings(
        catalog, topic, lambda before: changed(settings, before, parsed, names)
    )
    return in_effect(settings, after)


def topic_settings(
    catalog: Catalog, topic: TopicName, settings: StoreSettings
) -> list[TopicSetting]:
    """Returns the settings of a topic, with their values and where these come from."""
    return in_effect(settings, read_topic_settings(catalog, topic))


def effective_settings(
    catalog: Catalog, topic: TopicName, settings: StoreSettings
) -> StoreSettings:
    """Returns the settings of the store with the topic's own in place of some."""
    return accepted(topic, settings, read_topic_settings(catalog, topic))


def accepted(topic: TopicName, settings: StoreSettings, own: Mapping[str, Any]) -> StoreSettings:
    """Returns the effective settings; DescriptorError if a value of the topic is not accepted."""
    try:
        return effective(settings, own) if own else settings
    except InvalidSetting as error:
        raise DescriptorError(
            f"{topic}: its setting {error}. Change it with `forebay topics configure {topic}`"
        ) from error
