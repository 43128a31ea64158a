"""The metrics of subscriptions. Gauges are set by `forebay.dispatch.gauges`."""

from __future__ import annotations

from typing import Final

from forebay.metrics import Collected, Counter

GONE: Final = Counter(
    "forebay_subscription_gone_total",
    "Offsets that a subscription went past without a message: recorded as lost, or removed by "
    "retention before it read them.",
    ["topic", "subscription", "why"],
)
DEAD_LETTERS: Final = Counter(
    "forebay_subscription_dead_letters_total",
    "Messages that were moved to a dead-letter topic.",
    ["topic", "subscription"],
)
DROPPED: Final = Counter(
    "forebay_broker_nonreliable_dropped_total",
    "Messages of non-reliable topics that a subscription did not get: it had no consumer, or that "
    "did not read.",
    ["topic"],
)
POSITION: Final = Collected(
    "forebay_subscription_position",
    "The lowest offset that a subscription has not acknowledged.",
    ["topic", "subscription"],
)
LAG: Final = Collected(
    "forebay_subscription_lag_messages",
    "Synced messages that a subscription has not acknowledged.",
    ["topic", "subscription"],
)
LAG_BYTES: Final = Collected(
    "forebay_subscription_lag_bytes",
    "About how many bytes these messages have.",
    ["topic", "subscription"],
)
LAG_SECONDS: Final = Collected(
    "forebay_subscription_lag_seconds",
    "Age of the oldest message that a subscription has not acknowledged; left out while unknown.",
    ["topic", "subscription"],
)
OUTSTANDING: Final = Collected(
    "forebay_subscription_outstanding_messages",
    "Messages that were delivered and not acknowledged.",
    ["topic", "subscription"],
)
CONSUMERS: Final = Collected(
    "forebay_subscription_consumers",
    "Consumers that are connected to a subscription.",
    ["topic", "subscription"],
)
DELIVERED: Final = Collected(
    "forebay_subscription_delivered_messages",
    "Messages delivered to consumers since the server started, redeliveries included.",
    ["topic", "subscription"],
)
REDELIVERED: Final = Collected(
    "forebay_subscription_redelivered_messages",
    "Messages delivered again since the server started.",
    ["topic", "subscription"],
)
NOT_SHOWN: Final = Collected(
    "forebay_subscriptions_not_shown",
    "Subscriptions that are loaded and not reported: those after 1000.",
)
FAILING: Final = Collected(
    "forebay_subscription_failing",
    "1 if the subscription cannot deliver a message now, or blocks on a poison message; else 0.",
    ["topic", "subscription"],
)
