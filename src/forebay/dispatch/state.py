"""What a window keeps: messages that are not acknowledged, their groups, and consumers.

Everything between the position and `next_offset` is in exactly one state:

    acknowledged   not in the window: it keeps only what is not acknowledged
    SENT           at a consumer
    WAITING        to be sent again, at a later time
    READY          to be sent again, now
    KEPT           read and never sent, because nobody may take it yet (key-shared only)
    BLOCKED        failed too often: it stays until somebody acknowledges, skips or seeks
    DEAD           failed too often: `poisoned` returns it next
    WRITING        `poisoned` returned it; `ack` or `unpoison` ends that
    RETRY          `poisoned` returns it again, at a later time
"""

from __future__ import annotations

from typing import Final

from forebay.dispatch.key_router import Key, Spot
from forebay.dispatch.offsets import Offsets

SENT: Final = 0
WAITING: Final = 1
READY: Final = 2
KEPT: Final = 3
BLOCKED: Final = 4
DEAD: Final = 5
WRITING: Final = 6
RETRY: Final = 7

SENDABLE: Final = frozenset({READY, KEPT})


class Message:
    """A message that is not acknowledged."""

    __slots__ = ("attempts", "consumer", "group", "offset", "state", "time_ms")

    def __init__(self, offset: int, group: Group | None, state: int) -> None:
        self.offset = offset
        self.group = group
        self.state = state
        self.consumer: Consumer | None = None
        self.attempts = 0
        """How often it was nacked or timed out; of a dead letter, how often it was not written."""
        self.time_ms = 0
        """When its acknowledgement times out, if it is SENT."""


class Group:
    """Messages that keep their order; of these, one consumer at a time has some."""

    __slots__ = (
        "generation",
        "key",
        "owner",
        "place",
        "place_at",
        "queue",
        "sent",
        "spot",
        "target",
    )

    def __init__(self, key: Key) -> None:
        self.key = key
        self.sent = 0
        """How many of its messages the owner has."""
        self.owner: Consumer | None = None
        self.queue = Offsets()
        """Those that are not at the owner."""
        self.place: Consumer | None = None
        """Who may take the first of the queue, once it has room; it is in `ready` there."""
        self.place_at = 0
        self.target: Consumer | None = None
        """Who got the messages when the group was placed."""
        self.spot: Spot | None = None
        self.generation = 0
        """That of the spot."""


class Consumer:
    """A stream that takes messages. A takeover makes a new one."""

    __slots__ = (
        "alarmed",
        "available",
        "filters",
        "in_ring",
        "name",
        "number",
        "paused",
        "ready",
        "sent",
        "takes_any",
    )

    def __init__(self, number: int, name: str, filters: tuple[str, ...]) -> None:
        self.number = number
        self.name = name
        self.filters = filters
        self.sent: dict[int, Message] = {}
        """In the order they were sent, so that the first times out first."""
        self.paused = False
        self.available = False
        """Whether it is here, not paused, and has room."""
        self.takes_any = True
        """Whether it takes messages without a group."""
        self.in_ring = False
        self.alarmed = False
        self.ready = Offsets()
        """The first message of each group that it may take."""
