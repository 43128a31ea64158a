"""Windows with consumers, and what tests do with them all the time."""

from __future__ import annotations

from collections.abc import Iterable

from forebay.dispatch.policy import Policy, SubscriptionType
from forebay.dispatch.window import Verdict, Window
from forebay.format.cursor import Cursor

Given = tuple[int, int | None]
"""An offset, and who got it."""


def window(
    kind: SubscriptionType,
    consumers: Iterable[int] = (1,),
    policy: Policy | None = None,
    cursor: Cursor | None = None,
) -> Window:
    """A window at time 0; consumer 1 has the name `c1`."""
    made = Window(kind, policy or Policy(), cursor or Cursor())
    for each in consumers:
        made.join(each, f"c{each}", (), 0)
    return made


def feed(made: Window, count: int, keys: str | list[str] = "", now_ms: int = 0) -> list[Given]:
    """Offers new messages, with these keys in turn; returns those that were sent."""
    given: list[Given] = []
    for at in range(count):
        offset = made.next_offset
        verdict, consumer = made.offer(offset, keys[at % len(keys)] if keys else None, now_ms)
        given += [(offset, consumer)] if verdict is Verdict.SENT else []
    return given


def feed_due(made: Window, now_ms: int, limit: int = 1000) -> list[Given]:
    """Offers what is due; all of it must be sent, unless somebody has no room any more."""
    given: list[Given] = []
    for offset in made.due(now_ms, limit):
        verdict, consumer = made.offer(offset, None, now_ms)
        given += [(offset, consumer)] if verdict is Verdict.SENT else []
    return given


def offsets(given: list[Given]) -> list[int]:
    return [offset for offset, _ in given]
