"""Messages from a running server: `forebay consume` through HTTP.

The stream goes on by offset: where the server goes away for a moment, it is asked again from the
next offset on, for a bounded time. So no message is printed twice, and none is left out. What is at
the address then has to be a server of the same store: offsets mean nothing in another one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import click

from forebay.cli.servers import connected, refused_token
from forebay.errors import (
    ForebayError,
    LogClosed,
    LostOffsets,
    ServiceError,
    ServiceRefused,
    ServiceUnavailable,
    TopicFenced,
)
from forebay.format.names import TopicName
from forebay.settings import ServerAddress

if TYPE_CHECKING:
    from forebay.remote import ServerClient

RECONNECT_SECONDS: Final = 30.0
_PAUSE_SECONDS: Final = 0.25
_STEADY_SECONDS: Final = 5.0
"""A request that lasted so long was heard; one that did not may have been turned away."""
_AWAY: Final = (ServiceUnavailable, LogClosed, TopicFenced)
"""What a server says, or what is said of it, that is on its way out."""


@dataclass(frozen=True, slots=True)
class Wanted:
    start: str
    """An offset, `earliest` or `latest`."""
    end: int | None
    follow: bool
    limit: int | None
    skip_lost: bool

    def query(self) -> dict[str, str | int]:
        found: dict[str, str | int] = {"start": self.start}
        if self.end is not None:
            found["end"] = self.end
        if self.limit is not None:
            found["limit"] = self.limit
        for name in ("follow", "skip_lost"):
            if getattr(self, name):
                found[name] = "true"
        return found


def received(
    address: ServerAddress,
    topic: TopicName,
    wanted: Wanted,
    find_again: Callable[[], ServerAddress | None],
    reconnect_seconds: float = RECONNECT_SECONDS,
) -> Generator[dict[str, Any], None, None]:
    """The messages as facts. `find_again` answers where the server is after it was away.

    None where it can only be where it was.
    """
    seen = False
    away: float | None = None
    while True:
        began = time.monotonic()
        try:
            with connected(address) as client:
                address = client.address  # held to its store from the first time on
                for facts in _once(client, topic, wanted):
                    seen, away = True, None
                    if "offset" in facts:
                        wanted = _after(wanted, int(facts["offset"]) + 1, 1)
                        yield facts
                    elif "lost" in facts:
                        _say_lost(facts["lost"])
                        wanted = _after(wanted, int(facts["lost"][1]), 0)
            if _is_all(wanted):
                return
        except _AWAY as error:
            if not seen and not wanted.follow:
                raise
            now = time.monotonic()
            if away is None or now - began > _STEADY_SECONDS:
                away = now  # it was there until now, whether or not anything came
            if now - away >= reconnect_seconds:
                raise ServiceUnavailable(
                    f"{error}; it was asked for {reconnect_seconds:.0f} seconds; go on with "
                    f"--start {wanted.start}"
                ) from error
            seen = True
        time.sleep(_PAUSE_SECONDS)
        if (found := find_again()) is not None:
            address = replace(found, store=address.store or found.store)


def _once(
    client: ServerClient, topic: TopicName, wanted: Wanted
) -> Generator[dict[str, Any], None, None]:
    """One request. A reader that follows is told at once where `latest` is, if nothing comes."""
    from forebay.remote.client import topic_path
    from forebay.remote.told import told_error

    try:
        for line in client.lines(topic_path(topic, "messages"), wanted.query()):
            facts = json.loads(line)
            if "error" in facts:
                raise told_error(facts["error"])
            yield facts
    except LostOffsets as lost:
        raise with_advice(lost) from lost
    except ServiceRefused as error:
        raise refused_token(error, client.address) from error
    except ValueError as error:
        if isinstance(error, ForebayError):
            raise
        raise ServiceError(f"{client.address.url}: a line that is not JSON: {error}") from error


def _after(wanted: Wanted, offset: int, taken: int) -> Wanted:
    limit = None if wanted.limit is None else wanted.limit - taken
    return replace(wanted, start=str(offset), limit=limit)


def _is_all(wanted: Wanted) -> bool:
    """Whether a stream that ended in order has ended for good."""
    if not wanted.follow or wanted.limit == 0:
        return True
    if wanted.end is None or not wanted.start.isdecimal():
        return False
    return int(wanted.start) >= wanted.end


def _say_lost(lost: list[int]) -> None:
    start, end = lost
    click.echo(f"forebay: skipped offsets {start} to {end - 1}: lost", err=True)


def with_advice(lost: LostOffsets) -> LostOffsets:
    """The same, with the options that lead over it."""
    return LostOffsets(
        f"{lost} (--start {lost.end}), or use --skip-lost", start=lost.start, end=lost.end
    )
