"""What clients wrote down about their messages, and whether the broker kept its promises.

It knows nothing of the broker but its cursors. See `danube_load` for the files.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from forebay.format.cursor import Cursor


@dataclass(frozen=True, slots=True)
class Delivered:
    time_ns: int
    offset: int
    key: str
    payload: str


@dataclass(slots=True)
class Evidence:
    """The events of one subscription, of all its consumers."""

    deliveries: list[Delivered] = field(default_factory=list)
    answered: set[int] = field(default_factory=set)
    """Offsets that a consumer acknowledged, or was about to."""
    nacks: int = 0

    @property
    def offsets(self) -> set[int]:
        return {each.offset for each in self.deliveries}

    @property
    def repeated(self) -> int:
        """Deliveries of what was delivered before."""
        return len(self.deliveries) - len(self.offsets)

    def require_order(self, *, by_key: bool) -> None:
        """First deliveries ascend: in the whole topic, or for each key."""
        seen: set[int] = set()
        highest: dict[str, int] = defaultdict(lambda: -1)
        for each in sorted(self.deliveries, key=lambda found: found.time_ns):
            if each.offset in seen:
                continue
            seen.add(each.offset)
            group = each.key if by_key else ""
            assert each.offset > highest[group], (
                f"{each} came first after {highest[group]} of the same group"
            )
            highest[group] = each.offset

    def require_behind(self, cursor: Cursor, what: str) -> None:
        """The cursor holds nothing that nobody acknowledged. Read it before the files."""
        below = set(range(cursor.position)) - self.answered
        assert not below, f"{what} passed {sorted(below)[:10]}, which nobody acknowledged"
        for start, end in cursor.ranges:
            inside = set(range(start, end)) - self.answered
            assert not inside, f"{what} has {sorted(inside)[:10]}, which nobody acknowledged"

    def beyond(self, cursor: Cursor) -> int:
        """How many delivered messages a broker with this cursor delivers once more."""
        return sum(not cursor.contains(each) for each in self.offsets)


class Oracle:
    """Reads the files of one folder, as far as they have grown."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}
        self.sent: set[str] = set()
        """Payloads that were acknowledged to their producers."""
        self.subscriptions: dict[str, Evidence] = defaultdict(Evidence)

    def look(self) -> None:
        for path in sorted(self._folder.glob("*.events")):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                data = file.read()
            whole = data.rfind(b"\n") + 1
            self._read[path] = self._read.get(path, 0) + whole
            for line in data[:whole].decode().splitlines():
                self._take(line.split(" "))

    def _take(self, words: list[str]) -> None:
        match words:
            case ["P", payload]:
                self.sent.add(payload)
            case ["D", where, offset, key, payload, time_ns]:
                found = Delivered(int(time_ns), int(offset), key, payload)
                self.subscriptions[where].deliveries.append(found)
            case ["A", where, offset]:
                self.subscriptions[where].answered.add(int(offset))
            case ["N", where, _]:
                self.subscriptions[where].nacks += 1
            case _:
                raise AssertionError(f"not an event: {words}")

    def missing(self, where: str) -> set[str]:
        """Messages that were acknowledged to a producer, and not delivered."""
        return self.sent - {each.payload for each in self.subscriptions[where].deliveries}
