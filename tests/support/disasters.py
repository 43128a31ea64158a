"""Histories of a topic and of everything that can befall it, with an oracle.

A history is a list of steps: messages are appended and uploaded; the process is closed or crashes;
copies of the log and of the catalog are taken and put back later; log, catalog and the newest
objects are lost or damaged; an operator runs commands. `run` carries a history out on a store in a
directory, and raises `Broken` as soon as a promise is broken:

1. an offset that was acknowledged is never given to another message;
2. every acknowledged message can be read, or its offset is *told*: an error of the reader, a hole
   of the topic's record, or an offset before the topic's start;
3. no reader returns anything but what was acknowledged at that offset;
4. whenever something is refused, the commands that the error names lead to a topic that opens,
   appends, uploads and reads;
5. a committed object never changes, and no command deletes the last sound object with a message,
   unless another object has its offset and the right size: a sweep does not read objects, so it
   cannot know that a byte of the compacted one was flipped.

One limit is known: an object that is gone, whose first messages are nowhere, and after which other
objects exist, is given up whole by `restore --allow-gaps`, although the log holds its last
messages. The report tells them as lost.

Three things no system can know, so no history does them:

- Log and catalog are as they were at one moment of the last opening, and the bucket shows nothing
  later: a crash at that moment looks the same (`World.is_past`). Copies that were taken while the
  last process ran can do that, after a crash: a copy of the log, if neither catalog nor bucket
  shows an offset at or after its end; or a copy of the catalog, if the log of that opening is lost
  and the copy does not have the reservation.
- Log, catalog *and bucket* are put back. The bucket is never put back here.
- The operator asserts what is false: `--assume-nothing-lost` is given only if objects hold every
  acknowledged offset, and `--next-offset` only with an offset after all of them.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from forebay.catalog.records import TopicRecord
from forebay.errors import ForebayError, LostOffsets, ServiceUnavailable, UsageError
from forebay.format.frame import scan
from forebay.format.names import SIDECAR_ENDING, objects_prefix, parse_object, parse_topic
from forebay.repair.repair import repair
from forebay.settings import (
    DeleterSettings,
    MetadataSettings,
    RemoteRetentionSettings,
    StoreSettings,
    UploaderSettings,
    WalSettings,
)
from forebay.topic.accept import accept_loss
from forebay.topic.resources import StoreResources
from forebay.topic.store import Store, Topic
from forebay.topic.view import StoreView
from forebay.upload.sweep import sweep
from support.restores import restore
from support.storages import factory_of, storage_of

TOPIC: Final = parse_topic("/default/orders")
COMMANDS_MAX: Final = 12
"""Commands that an operator tries to get out of one state."""
_COMMAND: Final = re.compile(r"`forebay (restore|repair|sweep|accept-loss)([^`]*)`")
_VARYING: Final = re.compile(r"(file://)?/\S+/\S*|[0-9a-f]{32}|-?\d+")
_FLAG: Final = re.compile(r"--[a-z-]+")
_Result = TypeVar("_Result")


class Step(NamedTuple):
    name: str
    number: int
    """What the step makes of it is up to the step: how many messages, which copy, which flags."""

    def __repr__(self) -> str:
        return f"({self.name!r}, {self.number})"


class Broken(AssertionError):
    """A promise was broken; `kind` says which, without what differs from one run to the next."""

    def __init__(self, promise: str, detail: str) -> None:
        text = f"{promise}: {detail}"
        super().__init__(text)
        self.kind = _VARYING.sub("", text)[:150]


@dataclass(frozen=True)
class LogFacts:
    """What the model knows about the log in the directory, or in a copy."""

    opening: int
    """The number of the opening in which it was written last."""
    end: int
    """One more than its last offset."""


@dataclass(frozen=True)
class CatalogFacts:
    """What a catalog is certain of."""

    opening: int = 0
    """The last opening that it knows."""
    end: int = 0
    """No offset before this one is free."""


@dataclass(frozen=True)
class Copy:
    log: dict[str, bytes]
    catalog: dict[str, bytes]
    log_facts: LogFacts | None
    catalog_facts: CatalogFacts


@dataclass
class World:
    """One topic of one store, and the oracle."""

    data: Path
    acknowledged: dict[int, bytes] = field(default_factory=dict)
    trail: list[str] = field(default_factory=list)
    """What happened, for the failure's message."""

    def __post_init__(self) -> None:
        self.store: Store | None = None
        self.copies: list[Copy] = []
        self.openings = 0
        self.log: LogFacts | None = None
        self.catalog = CatalogFacts()
        self.rolling, self.sidecars = False, True
        self.retired: set[int] = set()
        """Offsets that remote retention has deleted, as it should."""
        self.hints: list[str] = []
        """The commands that the last repair named for what it left."""
        self.accepting = False
        """Whether a restore has just accepted every loss."""
        self.damaged: set[str] = set()
        """Objects that a step damaged: a repair may change them."""
        self.flipped: set[str] = set()
        """Those of them whose size is right. A sweep reads no objects, so it trusts them."""
        self._objects: dict[str, bytes] = {}

    # -- where things are -----------------------------------------------------------------------

    @property
    def settings(self) -> StoreSettings:
        return StoreSettings(
            data=self.data,
            wal=WalSettings(rotate_max_bytes=600),
            uploader=UploaderSettings(
                enabled=False,
                max_object_bytes=700,
                rolling=self.rolling,
                sidecars=self.sidecars,
            ),
            deleter=DeleterSettings(
                retention_time_minutes=0, retention_size_mb=0, deletion_lag_minutes=0
            ),
            metadata=MetadataSettings(lease_seconds=60, offsets_reserved=20),
            remote_retention=RemoteRetentionSettings(size_mb=0.001),
        )

    @property
    def log_folder(self) -> Path:
        return self.data / "wal" / TOPIC.namespace / TOPIC.topic

    @property
    def objects_folder(self) -> Path:
        return self.data / "objects" / objects_prefix(TOPIC)

    def say(self, text: str) -> None:
        self.trail.append(text)

    # -- the process ----------------------------------------------------------------------------

    @property
    def topic(self) -> Topic:
        """The topic, opened if it is not; whatever the operator has to do for that is done."""
        return self.led_out(self._open)

    def _open(self) -> Topic:
        if self.store is None:
            self.end_leases()
            sound = self.offsets_in_log()
            self.store = Store(self.settings)
            try:
                topic = self.store.topic(str(TOPIC))
            except ForebayError:
                self.close()
                raise
            self.openings += 1
            end = topic.watermarks().appended
            self.log = LogFacts(self.openings, end)
            self.catalog = CatalogFacts(self.openings, max(self.catalog.end, self.record().tail))
            self.say(f"opened at {end}: {self.record()}")
            self.check(topic, sound)
            if self.accepting and (self.record().lost or self.record().unknown):
                raise Broken("not accepted", f"{self.record()}")
            self.accepting = False
        return self.store.topic(str(TOPIC))

    def close(self) -> None:
        if self.store is not None:
            opened = self.store.opened(str(TOPIC))
            if opened is not None:
                end = opened.watermarks().appended
                self.log = LogFacts(self.openings, end)
                self.catalog = CatalogFacts(self.openings, max(self.catalog.end, end))
            self.store.close()
            self.store = None

    def crash(self) -> None:
        """Ends the process as kill -9 does: what it does while it closes is undone."""
        if self.store is not None:
            before = self.copied()
            self.store.close()
            self.store = None
            self.put_back_log(before)
            self.put_back_catalog(before)

    def end_leases(self) -> None:
        """Time passes, so that no lease is left of a process that ended."""
        path = self.data / "catalog.db"
        if path.exists():
            with closing(sqlite3.connect(path)) as connection, suppress(sqlite3.OperationalError):
                connection.execute("UPDATE leases SET expires = 0")
                connection.commit()

    def resources(self) -> StoreResources:
        if not (self.data / "catalog.db").exists():
            raise UsageError("there is no catalog: `forebay restore` creates one")
        return StoreResources(self.settings)

    def record(self) -> TopicRecord:
        assert self.store is not None
        resources = factory_of(self.store).resources
        assert resources is not None
        found = resources.catalog.record(TOPIC)
        assert found is not None
        return found

    # -- copies ---------------------------------------------------------------------------------

    def copied(self) -> Copy:
        log = {
            str(path.relative_to(self.log_folder)): path.read_bytes()
            for path in self.log_folder.rglob("*")
            if path.is_file()
        }
        facts = self.log
        if self.store is not None and (opened := self.store.opened(str(TOPIC))) is not None:
            facts = LogFacts(self.openings, opened.watermarks().appended)
        names = ("catalog.db", "catalog.db-wal")
        catalog = {
            name: (self.data / name).read_bytes() for name in names if (self.data / name).exists()
        }
        return Copy(log, catalog, facts, self.catalog)

    def lose_log(self) -> None:
        shutil.rmtree(self.log_folder, ignore_errors=True)
        self.log = None

    def lose_catalog(self) -> None:
        for name in ("catalog.db", "catalog.db-wal", "catalog.db-shm"):
            (self.data / name).unlink(missing_ok=True)
        self.catalog = CatalogFacts()

    def put_back_log(self, copy: Copy) -> None:
        self.lose_log()
        for name, data in copy.log.items():
            path = self.log_folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        self.log = copy.log_facts

    def put_back_catalog(self, copy: Copy) -> None:
        self.lose_catalog()
        for name, data in copy.catalog.items():
            (self.data / name).write_bytes(data)
        self.catalog = copy.catalog_facts

    def is_past(self) -> bool:
        """Whether log, catalog and bucket are as a crash during the last opening had left them.

        That is so if nothing shows an offset that was acknowledged afterwards: the log is from that
        opening and ends before it, or no log of that opening is there and the catalog has not
        reserved it.
        """
        last = max(self.acknowledged, default=-1)
        log, catalog = self.log, self.catalog
        if self.store is not None or (log is not None and log.end > last):
            return False
        if log is not None and log.opening == self.openings:
            return max(catalog.end, self.bucket_end()) <= log.end
        reserved = self.reserved()
        if reserved is None or catalog.opening < self.openings:
            return False
        return reserved <= last and self.bucket_end() <= catalog.end

    def reserved(self) -> int | None:
        """Up to where the catalog says that offsets are reserved; None if it has no record."""
        path = self.data / "catalog.db"
        if not path.exists():
            return None
        with closing(sqlite3.connect(path)) as connection:
            key = f"%{TOPIC}/record"
            found = connection.execute("SELECT value FROM keys WHERE key LIKE ?", (key,)).fetchone()
        return None if found is None else int(json.loads(found[0])["reserved"])

    def bucket_end(self) -> int:
        names = map(parse_object, self.objects())
        return max((name.end + 1 for name in names if name is not None), default=0)

    # -- what is stored, seen without the product -----------------------------------------------

    def objects(self) -> dict[str, bytes]:
        """The data objects by name."""
        if not self.objects_folder.exists():
            return {}
        return {
            path.name: path.read_bytes()
            for path in sorted(self.objects_folder.iterdir())
            if parse_object(path.name) is not None
        }

    def stored(self) -> set[int]:
        """The acknowledged offsets that sound objects hold."""
        found: set[int] = set()
        for name, raw in self.objects().items():
            found |= self._sound(name, raw)
        return found

    def _sound(self, name: str, raw: bytes) -> set[int]:
        parsed = parse_object(name)
        assert parsed is not None
        frames = scan(raw)
        offsets = list(frames.offsets)
        if frames.safe_length != len(raw) or offsets != list(range(parsed.start, parsed.end + 1)):
            return set()
        return self._held(raw, frames)

    def _held(self, raw: bytes, frames: Any) -> set[int]:
        return {
            offset
            for offset, at, size in zip(
                frames.offsets, frames.positions, frames.lengths, strict=True
            )
            if self.acknowledged.get(offset, b"\0") in raw[at : at + size]
        }

    def offsets_in_log(self) -> set[int]:
        """The offsets in the local log, if that is the newest one."""
        log = self.log
        if log is None or log.opening != self.openings:
            return set()
        if self.acknowledged and log.end <= max(self.acknowledged):
            return set()
        found: set[int] = set()
        for path in self.log_folder.glob("wal*.log"):
            raw = path.read_bytes()
            found |= self._held(raw, scan(raw))
        return found

    # -- the oracle -----------------------------------------------------------------------------

    def append(self, count: int) -> None:
        payloads = [b"message %d;" % (len(self.acknowledged) + at) for at in range(count)]
        offsets = self.led_out(lambda: self._open().append_many(payloads, durability="synced"))
        again = [offset for offset in offsets if offset in self.acknowledged]
        if again:
            raise Broken("an offset is given again", f"{again}")
        self.acknowledged |= dict(zip(offsets, payloads, strict=True))
        self.say(f"appended {offsets.start} to {offsets.stop - 1}")

    def upload(self) -> None:
        def action() -> None:
            topic = self._open()
            done = topic.upload()
            self.say(f"uploaded {[each.object_id for each in done]}")
            marks = topic.watermarks()
            if marks.uploaded != marks.appended:
                raise Broken("not uploaded", f"{marks}")
            self.catalog = CatalogFacts(self.openings, max(self.catalog.end, marks.uploaded))

        self.led_out(action)

    def check(self, topic: Topic, sound: set[int]) -> None:
        """Reads everything. `sound` are the offsets that the newest log had before the opening."""
        found, errors = self.read_all(topic)
        record = self.record()
        holes = record.holes
        start, end = topic.start_offset, topic.watermarks().appended
        stored = self.stored()
        for offset, payload in self.acknowledged.items():
            if offset in found:
                if found[offset] != payload:
                    raise Broken("another message", f"{found[offset]!r} for {payload!r}, {offset}")
                continue
            told = (
                offset < start
                or offset in self.retired
                or offset in errors
                or _within(holes, offset)
            )
            if offset >= end:
                raise Broken("beyond the end", f"{offset}; the next offset is {end}")
            if offset in self.retired:
                continue
            if not told:
                raise Broken("not told", f"{offset} cannot be read")
            if offset < start and (offset in stored or offset in sound):
                raise Broken("hidden before the start", f"{offset} is stored; start is {start}")
            if offset in stored and offset not in errors:
                raise Broken("stored, and a hole", f"{offset}: {record}")
            hole = next((each for each in holes if each[0] <= offset < each[1]), None)
            later = hole is not None and any(each >= hole[1] for each in stored)
            if offset in sound and not (hole and later and hole[0] < min(sound)):
                raise Broken("in the newest log, and a hole", f"{offset}: {record}")
        strange = found.keys() - self.acknowledged.keys()
        if strange:
            raise Broken("a message from nowhere", f"{sorted(strange)}")

    def read_all(self, topic: Topic) -> tuple[dict[int, bytes], set[int]]:
        """Every message, and the acknowledged offsets for which a reader raised."""
        found: dict[int, bytes] = {}
        errors: set[int] = set()
        at, end = topic.start_offset, topic.watermarks().appended
        while at < end:
            try:
                for message in topic.read(at, end=end):
                    if message.offset < at:
                        raise Broken("out of order", f"{message.offset} after {at}")
                    found[message.offset] = message.payload
                    at = message.offset + 1
                break
            except LostOffsets as hole:
                if hole.end <= at:
                    raise Broken("a hole elsewhere", f"it ends at {hole.end}, at {at}") from hole
                errors |= {each for each in self.acknowledged if hole.start <= each < hole.end}
                at = hole.end
            except ForebayError:
                errors.add(at)
                at = min((each for each in self.acknowledged if each > at), default=end)
        return found, errors

    def check_objects(self, step: str) -> None:
        """No object has changed, and no command has deleted the last sound one of a message."""
        before, after = self._objects, self.objects()
        for name, data in after.items():
            if name in before and before[name] != data and name not in self.damaged:
                raise Broken("an object changed", f"{name}, in {step}")
        held = set().union(*(self._sound(name, raw) for name, raw in before.items()))
        known = self.stored() | self.retired | self._trusted(after)
        gone = held - known if before.keys() - after.keys() else set()
        if gone:
            raise Broken("the last object was deleted", f"{sorted(gone)}, in {step}")
        self._objects = after

    def _trusted(self, objects: dict[str, bytes]) -> set[int]:
        """The offsets of the objects that are damaged and have the right size."""
        names = [parse_object(name) for name in self.flipped & objects.keys()]
        return {at for name in names if name for at in range(name.start, name.end + 1)}

    # -- the operator ---------------------------------------------------------------------------

    def led_out(self, attempt: Callable[[], _Result]) -> _Result:
        """Returns what `attempt` does, after the commands that its errors name."""
        tried: list[str] = []
        while True:
            try:
                return attempt()
            except ForebayError as error:
                self.say(f"refused: {error}")
                self._follow(str(error), tried)

    def _follow(self, text: str, tried: list[str]) -> None:
        """Runs the first command that the text names and that works."""
        commands = [*commands_in(text), *self.hints]
        while True:
            left = [each for each in commands if tried.count(each) < 2]
            command = min(left, key=tried.count, default=None)  # an untried one first
            if command is None or len(tried) >= COMMANDS_MAX:
                raise Broken("no way out", f"{text} (tried {tried})")
            tried.append(command)
            try:
                self.command(command)
            except ForebayError as error:
                text = str(error)
                self.say(f"`{command}` refused: {text}")
                commands = [*commands_in(text, command), *commands]
                continue
            return

    def command(self, text: str) -> None:
        """Runs one command, on a store that no process has open."""
        self.close()
        self.end_leases()
        self.accepting = False
        name, *words = text.split()
        flags = {word.removeprefix("--").replace("-", "_") for word in words}
        if name == "restore":
            self.restore(flags)
        elif name == "repair":
            self.repair(accept_loss="accept_loss" in flags)
        elif name == "sweep":
            self.sweep()
        else:
            self.accept_loss()

    def restore(self, flags: set[str]) -> None:
        """A restore with these flags; those that would assert what is false are left out."""
        options: dict[str, Any] = dict.fromkeys(flags, True)
        after = max(self.acknowledged, default=-1) + 1
        if self.bucket_end() < after:
            options.pop("assume_nothing_lost", None)
        if options.pop("next_offset", False) and "assume_nothing_lost" not in options:
            options["next_offset"] = after
        report = restore(self.settings, str(TOPIC), **options)
        self.catalog = CatalogFacts(self.openings, max(self.catalog.end, report.tail))
        self.accepting = "accept_loss" in options
        self.say(f"restored with {options}: {report}")

    def repair(self, *, accept_loss: bool) -> None:
        with closing(self.resources()):
            pass
        report = repair(self.settings, [str(TOPIC)], apply=True, accept_loss=accept_loss)
        self.say(f"repaired: {report.findings}")
        self.hints = [each for left in report.left for each in commands_in(left.remedy)]

    def sweep(self) -> None:
        with closing(self.resources()) as resources:
            report = sweep(
                resources.catalog, resources.store, [TOPIC], grace_minutes=0, dry_run=False
            )
        self.say(f"swept: {report.items}")

    def accept_loss(self) -> None:
        with closing(self.resources()) as resources:
            self.say(f"accepted: {accept_loss(resources.catalog, TOPIC)}")

    # -- the steps ------------------------------------------------------------------------------

    def take(self, step: Step) -> None:
        """Takes one step, and checks the objects after it."""
        self.say(f"-- {step}")
        if step.name in ("lose", "lose_objects", "put_back"):
            self.accepting = False
        getattr(self, f"do_{step.name}")(step.number)
        self.check_objects(step.name)

    def do_settings(self, number: int) -> None:
        """What the process is started with from now on."""
        self.close()
        self.rolling, self.sidecars = bool(number & 1), not number & 2

    def do_accept(self, _number: int) -> None:
        """Accepts every hole, also under a living owner."""
        with suppress(ForebayError):
            self.accept_loss()

    def do_append(self, number: int) -> None:
        self.append(1 + number % 20)

    def do_upload(self, _number: int) -> None:
        self.upload()

    def do_reopen(self, _number: int) -> None:
        self.close()
        _ = self.topic

    def do_crash(self, _number: int) -> None:
        self.crash()

    def do_close(self, _number: int) -> None:
        self.close()

    def do_trim(self, _number: int) -> None:
        topic = self.topic
        topic.rotate()
        with suppress(ForebayError):  # an object is missing or damaged: nothing is deleted
            topic.trim_local()

    def do_retain(self, _number: int) -> None:
        """One pass of remote retention, which keeps about a kilobyte of objects."""
        topic = self.topic
        with suppress(ForebayError):  # an object is missing: the next pass tries again
            storage_of(topic).trim_remote()
        self.retired |= {offset for offset in self.acknowledged if offset < topic.start_offset}
        self._objects = self.objects()

    def do_upload_dies(self, _number: int) -> None:
        """The process is killed when an object is stored, and before it is committed."""
        topic = self.topic
        assert self.store is not None
        resources = factory_of(self.store).resources
        assert resources is not None
        resources.catalog.put_object_descriptor = _unavailable  # type: ignore[method-assign]
        with suppress(ForebayError):
            topic.upload()
        self.crash()

    def do_copy(self, _number: int) -> None:
        self.copies.append(self.copied())

    def _end(self, number: int) -> None:
        if number % 2:
            self.close()
        else:
            self.crash()

    def do_put_back(self, number: int) -> None:
        """Puts a copy of the log, of the catalog, or of both back, after a close or a crash."""
        if not self.copies:
            return
        self._end(number)
        number //= 2
        copy = self.copies[number // 3 % len(self.copies)]
        before = self.copied()
        if number % 3 != 1:
            self.put_back_log(copy)
        if number % 3 != 0:
            self.put_back_catalog(copy)
        self._unless_past(before)

    def do_lose(self, number: int) -> None:
        """Loses the log, the catalog or both."""
        self._end(number)
        before = self.copied()
        if number // 2 % 3 != 1:
            self.lose_log()
        if number // 2 % 3 != 0:
            self.lose_catalog()
        self._unless_past(before)

    def _unless_past(self, before: Copy) -> None:
        if self.is_past():
            self.say("left out: nothing shows that this is the past")
            self.put_back_log(before)
            self.put_back_catalog(before)
        self.glance()

    def glance(self) -> None:
        """Reads as a process does that does not own the topic: an error, or the right messages."""
        with suppress(ForebayError), StoreView(self.settings) as store:
            view = store.topic(str(TOPIC))
            for message in view.reader(view.start_offset):
                if message.payload != self.acknowledged.get(message.offset):
                    raise Broken("another message in a view", f"{message}")

    def do_lose_objects(self, number: int) -> None:
        """Deletes or damages the last one or two objects, their sidecars, or both."""
        if number % 3:
            self._end(number)
        before = self.copied()
        number //= 3
        names = sorted(self.objects(), key=lambda name: parse_object(name).start)  # type: ignore[union-attr]
        kept = {path: path.read_bytes() for path in self._files(names[-1 - number % 2 :])}
        how = number // 2 % 5
        for path in kept:
            self._harm(path, how, number // 10)
        self.say(f"{('delete', 'flip', 'cut', 'sidecar gone', 'wrong index')[how]}: {names[-2:]}")
        if self.is_past():
            for path, data in kept.items():
                path.write_bytes(data)
            self._unless_past(before)
        else:
            self.damaged |= {path.name for path in kept}
            self.flipped |= {path.name for path in kept if how == 1}
        self._objects = self.objects()

    def _files(self, names: Sequence[str]) -> Iterator[Path]:
        for name in names:
            for each in (name, name + SIDECAR_ENDING):
                if (self.objects_folder / each).exists():
                    yield self.objects_folder / each

    def _harm(self, path: Path, how: int, number: int) -> None:
        is_sidecar = path.name.endswith(SIDECAR_ENDING)
        raw = path.read_bytes()
        at = number % len(raw)
        if how == 0 and (not is_sidecar or number % 2):
            path.unlink()
        elif how == 1 and not is_sidecar:
            path.write_bytes(raw[:at] + bytes([raw[at] ^ 4]) + raw[at + 1 :])
        elif how == 2 and not is_sidecar:
            path.write_bytes(raw[:at])
        elif how == 3 and is_sidecar:
            path.unlink()
        elif how == 4 and is_sidecar:
            body = json.loads(raw)
            body["offset_index"] = [*body["offset_index"][:1], [body["end_offset"], 17]]
            path.write_text(json.dumps(body, separators=(",", ":"), sort_keys=True))

    def do_compact(self, _number: int) -> None:
        from forebay.pipeline.jobs.compact import compact
        from forebay.topic.resources import close_executor_resources
        from support.inline_executor import InlineExecutor

        with suppress(ForebayError):
            compact(
                self.settings, [str(TOPIC)], target_bytes=5000, executor=InlineExecutor(slots=1)
            )
        close_executor_resources()

    def do_sweep(self, _number: int) -> None:
        with suppress(ForebayError):
            self.sweep()

    def do_restore(self, number: int) -> None:
        self._end(number)
        self.end_leases()
        names = ("allow_gaps", "verify", "assume_nothing_lost", "next_offset", "accept_loss")
        flags = {name for at, name in enumerate(names) if number >> (at + 1) & 1}
        with suppress(ForebayError):
            self.restore(flags)

    def do_repair(self, number: int) -> None:
        self._end(number)
        self.end_leases()
        with suppress(ForebayError):
            self.repair(accept_loss=bool(number & 2))


def _unavailable(*_given: Any, **_options: Any) -> Any:
    raise ServiceUnavailable("the process is about to die")


def _within(ranges: Sequence[tuple[int, int]], offset: int) -> bool:
    return any(start <= offset < end for start, end in ranges)


def commands_in(text: str, before: str = "") -> list[str]:
    """The commands that an error's text names. A flag alone belongs to the command `before`."""
    found = []
    for name, rest in _COMMAND.findall(text):
        found.append(" ".join([name, *sorted(_FLAG.findall(rest))]))
    if before:
        named = _FLAG.findall(_COMMAND.sub("", text))
        if "allow gaps" in text:
            named.append("--allow-gaps")
        name, *flags = before.split()
        if named and name in ("restore", "repair"):
            found.append(" ".join([name, *sorted({*flags, *named})]))
    return found


# ---- histories ----

WEIGHTS: Final = {
    "append": 16,
    "upload": 10,
    "upload_dies": 2,
    "retain": 2,
    "reopen": 4,
    "crash": 4,
    "close": 2,
    "trim": 3,
    "copy": 6,
    "put_back": 9,
    "lose": 7,
    "lose_objects": 4,
    "compact": 3,
    "sweep": 3,
    "restore": 5,
    "repair": 2,
    "accept": 2,
    "settings": 2,
}
FINALLY: Final = (Step("append", 0), Step("upload", 0), Step("reopen", 0), Step("append", 0))
"""Whatever has happened, the topic works in the end."""


def history(seed: int) -> list[Step]:
    dice = random.Random(seed)
    names = dice.choices([*WEIGHTS], [*WEIGHTS.values()], k=dice.randint(4, 28))
    return [Step(name, dice.randrange(1 << 16)) for name in names]


def run(folder: Path, steps: Sequence[Step]) -> None:
    """Carries the history out in a new directory below `folder`. Raises Broken."""
    data = folder / "data"
    shutil.rmtree(data, ignore_errors=True)
    world = World(data)
    data.mkdir(parents=True)
    try:
        for step in (*steps, *FINALLY):
            world.take(step)
    except Broken as error:
        error.add_note("\n".join(world.trail))
        raise
    except Exception as error:
        broken = Broken(f"{type(error).__name__} was raised", str(error))
        broken.add_note("\n".join(world.trail))
        raise broken from error
    finally:
        with suppress(ForebayError):
            world.close()


def outcome(folder: Path, steps: Sequence[Step]) -> Broken | None:
    try:
        run(folder, steps)
    except Broken as error:
        return error
    return None


def shrunk(folder: Path, steps: Sequence[Step], kind: str) -> tuple[list[Step], Broken]:
    """The shortest history found, with the smallest numbers, that breaks the same promise."""
    best = list(steps)
    error = outcome(folder, best)
    assert error is not None

    def fails(candidate: list[Step]) -> bool:
        nonlocal error
        found = outcome(folder, candidate)
        if found is not None and found.kind == kind:
            error = found
            return True
        return False

    size = len(best)
    while size:
        at = 0
        while at < len(best):
            fewer = best[:at] + best[at + size :]
            if fails(fewer):
                best = fewer
            else:
                at += size
        size //= 2
    for at, step in enumerate(best):
        for number in sorted({*range(16), step.number % 6, step.number % 30, step.number % 64}):
            smaller = [*best[:at], step._replace(number=number), *best[at + 1 :]]
            if number < step.number and fails(smaller):
                best = smaller
                break
    return best, error
