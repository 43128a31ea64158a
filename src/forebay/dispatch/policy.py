"""What a subscription promises: its type, and how unacknowledged messages are treated."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final, Literal

from forebay.errors import InvalidSetting

POISON_ACTIONS: Final = ("block", "drop", "dead_letter")
_DOUBLINGS_MAX: Final = 62
"""Beyond it, a delay of a millisecond has passed every limit."""


class SubscriptionType(IntEnum):
    """The numbers are those of Danube's protocol."""

    EXCLUSIVE = 0
    SHARED = 1
    FAILOVER = 2
    KEY_SHARED = 3


@dataclass(frozen=True, slots=True)
class Policy:
    max_unacked_messages: int = 100
    """The most messages that one consumer has and has not acknowledged."""
    ack_timeout_ms: int | None = 60_000
    """After this time without an answer a message is delivered again. None: never."""
    redelivery_delay_ms: int = 1_000
    """Before the first redelivery after a time-out, or after a nack without a delay. It doubles
    with every redelivery."""
    redelivery_delay_max_ms: int = 60_000
    max_redeliveries: int | None = None
    """None: a message is delivered again for ever."""
    poison: Literal["block", "drop", "dead_letter"] = "block"
    """What happens to a message that failed once more than `max_redeliveries`."""

    def __post_init__(self) -> None:
        _at_least(1, "max_unacked_messages", self.max_unacked_messages)
        _at_least(1, "ack_timeout_ms", self.ack_timeout_ms)
        _at_least(0, "redelivery_delay_ms", self.redelivery_delay_ms)
        _at_least(self.redelivery_delay_ms, "redelivery_delay_max_ms", self.redelivery_delay_max_ms)
        _at_least(0, "max_redeliveries", self.max_redeliveries)
        if self.poison not in POISON_ACTIONS:
            raise InvalidSetting(
                f"poison is {self.poison!r}; it must be one of {', '.join(POISON_ACTIONS)}"
            )

    def delay_ms(self, attempts: int) -> int:
        """The time before the redelivery after so many failed attempts, at least one."""
        doubled = self.redelivery_delay_ms << min(attempts - 1, _DOUBLINGS_MAX)
        return min(doubled, self.redelivery_delay_max_ms)

    def is_poison(self, attempts: int) -> bool:
        return self.max_redeliveries is not None and attempts > self.max_redeliveries


def _at_least(lowest: int, name: str, value: int | None) -> None:
    if value is not None and value < lowest:
        raise InvalidSetting(f"{name} is {value}; it must be at least {lowest}")
