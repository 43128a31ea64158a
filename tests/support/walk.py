"""A walk over the whole system: random operations of real processes, and an oracle.

A walk is a list of steps, drawn from a seed. It has two topics in one bucket and one catalog, and
two machines, which are directories: the owner is a process on one of them, and each job is a
process of its own. Processes are killed at calls of the store and of the catalog, in the middle of
appends, or stopped for longer than their lease; disks fill up; services go away; logs, catalogs and
objects are lost, damaged, or put back from an older copy.

The oracle knows only what was acknowledged or read (`Ledger.known`), and which of it a step of the
walk may have destroyed (`Ledger.endangered`). It raises `Broken` if

1. an offset gets a second message, or a message a second offset;
2. a message is not there, and nothing says so: a hole of the topic's record, or an error;
3. a message that nothing has endangered is not there;
4. an error leads nowhere: the commands that it names, or opening the topic again, must help;
5. a process says nothing any more, or raises anything but a ForebayError;
6. a process that was stopped past its lease acknowledges what it began afterwards;
7. in the end, the bucket is not the union of the descriptors, a sweep leaves an orphan, or a
   process that closed its store holds more than after its first close.

What no system can know is not done (see `disasters.py`): copies are taken while no process runs,
and put back only after a later opening has left its marker in the bucket.

    python -m support.walk SEED [COUNT]          on local disk and SQLite, in a new folder
    python -m support.walk --remote SEED         on a real S3 server and a real etcd
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from forebay.catalog.records import TopicRecord
from forebay.errors import (
    ForebayError,
    LedgerError,
    LogClosed,
    LogLocked,
    LogStopped,
    ObjectMissing,
    ServiceError,
    TopicFenced,
    TopicOwned,
)
from forebay.format.frame import scan
from forebay.format.message import decode_messages
from forebay.format.names import (
    SIDECAR_ENDING,
    ObjectName,
    object_files,
    object_of_file,
    objects_prefix,
    parse_ledger,
    parse_object,
    parse_topic,
)
from forebay.format.pulsar.frames import EntryAssembler
from forebay.format.pulsar.index import decode_index
from forebay.format.pulsar.topic_ledger import offsets_of_ledger
from support.disasters import COMMANDS_MAX, Broken, Step, commands_in
from support.etcd_server import EtcdServer
from support.s3_server import S3Server
from support.topic_evidence import raw_descriptors
from support.walk_export import rows_of
from support.walk_places import TOPICS, LocalPlace, Place, RemotePlace
from support.walk_process import (
    Nursery,
    ProcessDied,
    Reading,
    Worker,
    number_of,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MACHINES: Final = ("a", "b")
REOPENINGS_MAX: Final = 4
"""How often a topic is opened again after errors that ask for nothing else."""
TRAIL_MAX: Final = 300
"""What a failure shows of what happened before it."""
SETTLE_SECONDS_MAX: Final = 30.0
MEGABYTES_MAX: Final = 32
"""How much more memory a process may hold after its last close than after its first."""
_Result = TypeVar("_Result")

_PLAIN_WAYS: Final = (
    "synced",
    "many",
    "buffered",
    "flushed",
    "waited",
    "uploaded",
    "async",
    "many_async",
    "message",
    "threads",
)
WAYS: Final = (*_PLAIN_WAYS, *_PLAIN_WAYS, *_PLAIN_WAYS, "http")
"""How messages are appended. A server takes a while to start, so it is rarer."""


# ---- the oracle ---------------------------------------------------------------------------------


@dataclass
class Ledger:
    """What is known about one topic."""

    known: dict[int, int] = field(default_factory=dict)
    """The number of each message that was acknowledged or read, by offset."""
    offsets: dict[int, int] = field(default_factory=dict)
    """The other way round."""
    endangered: set[int] = field(default_factory=set)
    """Offsets whose messages a step may have destroyed."""
    attempted: set[int] = field(default_factory=set)
    retired: int = 0
    """Remote retention has deleted what is before this offset."""
    retaining: bool = False
    """Whether a pass of remote retention was cut short, so that the start may have moved."""
    damaged: set[str] = field(default_factory=set)
    """Objects that a step damaged or deleted."""
    exported: int | None = None
    """Where the exported table ends."""
    rows: dict[Path, list[tuple[int, bytes]]] = field(default_factory=dict)
    """The rows of the table, by file."""
    log_at: str | None = None
    """The machine of the newest log; `?` if an opening was cut short."""

    def learn(self, offset: int, number: int, how: str) -> None:
        self.compare(offset, number, how)
        self.known[offset] = number
        self.offsets[number] = offset

    def compare(self, offset: int, number: int, how: str) -> None:
        if self.known.get(offset, number) != number:
            raise Broken(
                "an offset has two messages", f"{offset}: {self.known[offset]}, {how} {number}"
            )
        if self.offsets.get(number, offset) != offset:
            raise Broken(
                "a message has two offsets", f"{number}: {self.offsets[number]}, {how} {offset}"
            )
        if number not in self.attempted:
            raise Broken("a message from nowhere", f"{number} at {offset}, {how}")

    def check(self, reading: Reading, holes: Iterable[tuple[int, int]], how: str) -> None:
        """Compares what a reader found and was told with what is known."""
        last = -1
        for offset, number in reading.found:
            if offset <= last:
                raise Broken("out of order", f"{offset} after {last}, {how}")
            last = offset
            self.learn(offset, number, how)
        self.check_start(reading.start, how)
        seen = dict(reading.found)
        told = [*reading.holes, *holes]
        for offset in self.known:
            if offset >= reading.end:
                raise Broken("beyond the end", f"{offset}; the end is {reading.end}, {how}")
            if offset < max(reading.start, self.retired) or offset in seen:
                continue
            if offset not in reading.errors and not any(a <= offset < b for a, b in told):
                errors = list(reading.errors.items())[:2]
                raise Broken("missing, and nothing says so", f"{offset}, {how}, errors {errors}")
            if offset not in self.endangered:
                why = reading.errors.get(offset, f"holes {told}")
                raise Broken("missing without a cause", f"{offset}: {why}, {how}")

    def check_start(self, start: int, how: str) -> None:
        hidden = [
            offset
            for offset in self.known
            if self.retired <= offset < start and offset not in self.endangered
        ]
        if hidden and not self.retaining:
            raise Broken("before the start without a cause", f"{hidden[:9]}; {start}, {how}")
        if hidden or start > self.retired:
            self.retired = max(self.retired, start)
        self.retaining = False


def _overlaps_in_part(one: ObjectName, other: ObjectName) -> bool:
    """Whether they share offsets, and each has some that the other has not."""
    if one.start > other.end or other.start > one.end:
        return False
    within = other.start <= one.start and one.end <= other.end
    around = one.start <= other.start and other.end <= one.end
    return not within and not around


def _more_than(first: dict[str, int], now: dict[str, int]) -> list[str]:
    """What a process holds more of than before, but for what its libraries keep for themselves."""
    slack = {"descriptors": 6, "threads": 3, "kilobytes": MEGABYTES_MAX << 10}
    return [what for what, some in slack.items() if now[what] > first[what] + some]


@dataclass(frozen=True)
class Copy:
    logs: dict[str, Path]
    catalog: Any
    openings: dict[str, int]


class Walk:
    """Carries out the steps of one walk. With a session, the steps on Spark run there."""

    def __init__(self, place: Place, nursery: Nursery, spark: SparkSession | None = None) -> None:
        self.place = place
        self._nursery = nursery
        self._spark = spark
        self.ledgers = {name: Ledger() for name in TOPICS}
        self.machine = "a"
        self.owner: Worker | None = None
        self._workers: list[Worker] = []
        self._idle: defaultdict[str, list[Worker]] = defaultdict(list)
        self._copies: list[Copy] = []
        self._openings: Counter[str] = Counter()
        """Openings that have left their marker in the bucket."""
        self._opened: set[str] = set()
        self._number = 0
        self._faulty = False
        self._ledgers: dict[str, ObjectName] = {}
        """The offsets of ledgers of Pulsar, which their names do not say, by their keys."""
        self._sound: dict[str, dict[int, int]] = {}
        self.trail: list[str] = []
        self.outcomes: Counter[str] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def say(self, text: str) -> None:
        self.trail.append(text[:600])

    # -- processes ------------------------------------------------------------------------------

    def spawn(self, *, plain: bool = False, machine: str | None = None) -> Worker:
        worker = Worker(self._nursery, self.place.settings(machine or self.machine), plain=plain)
        self._workers.append(worker)
        return worker

    @contextmanager
    def other(self, *, fatal: bool = False) -> Iterator[Worker]:
        """Another process on the same machine, for one job. One that survives it is used again."""
        idle = self._idle[self.machine]
        worker = idle.pop() if idle and not fatal else self.spawn()
        try:
            yield worker
        except BaseException:
            self._end(worker)
            raise
        if fatal or worker.ended:
            self._end(worker)
        else:
            idle.append(worker)

    def _end(self, worker: Worker) -> None:
        worker.close()
        self._workers.remove(worker)

    def collect(self, worker: Worker, *, endangered: bool = False) -> None:
        """Takes over what a process has acknowledged."""
        for name, offset, number, _ in worker.taken_acks():
            ledger = self.ledgers[name]
            if offset in ledger.known:
                raise Broken("an offset is given again", f"{name} {offset}: {number}")
            ledger.learn(offset, number, "acknowledged")
            if endangered and offset not in self.stored(name):
                ledger.endangered.add(offset)

    def lose_owner(self) -> None:
        """Ends the owner, dead or alive, without a close."""
        if self.owner is not None:
            self.owner.kill()
            self.collect(self.owner)
            self._end(self.owner)
            self.owner = None
            self._opened.clear()

    def close_owner(self) -> None:
        """Closes the store; the process stays, and holds no more than after its first close."""
        if self.owner is None:
            return
        try:
            holds = self.owner.ask("close")
        except ProcessDied:
            self.lose_owner()
            return
        except (ServiceError, LogStopped, TopicFenced) as error:
            self.say(f"closed with {error}")
            self._opened.clear()
            return
        self.collect(self.owner)
        self._opened.clear()
        first = self.owner.resting = self.owner.resting or holds
        deadline = time.monotonic() + SETTLE_SECONDS_MAX
        while more := _more_than(first, holds):
            if time.monotonic() > deadline:
                raise Broken("a process keeps what it opened", f"{more}: {first}, now {holds}")
            time.sleep(0.05)  # clients close their idle connections in threads of their own
            holds = self.owner.ask("holds")

    def nobody(self) -> None:
        """No process has the store open, and no lease is left."""
        self.close_owner()
        if self.owner is not None:
            self._end(self.owner)
            self.owner = None
        self.place.end_leases()

    # -- opening, and ways out of errors ----------------------------------------------------------

    def open(self, name: str) -> Worker:
        """Returns the owner, with the topic open, after whatever an operator has to do for that."""
        tried: list[str] = []
        hints: list[str] = []
        again = 0
        while True:
            if self.owner is None or self.owner.ended:
                self.lose_owner()
                self.owner = self.spawn(plain=self._number % 3 == 0)
            if name in self._opened:
                return self.owner
            ledger = self.ledgers[name]
            self._take_over(name)
            before, ledger.log_at = ledger.log_at, "?"
            try:
                start, end = self.owner.ask("open", name)
            except ProcessDied:
                self.say(f"{name}: died while it opened")
                continue
            except ForebayError as error:
                self.say(f"{name}: not opened: {error}")
                ledger.log_at = before if before == self.machine else "?"
                if self._faulty:
                    raise
                again += 1
                self._way_out(name, error, tried, hints, again)
                continue
            ledger.log_at = self.machine
            self._opened.add(name)
            self._openings[name] += 1
            self.say(f"{name}: opened on {self.machine}, {start} to {end}")
            ledger.check_start(start, "opened")
            if ledger.known and end <= max(ledger.known):
                raise Broken("beyond the end", f"{name} {max(ledger.known)}, opened at {end}")
            return self.owner

    def _take_over(self, name: str) -> None:
        """Before an opening: what only the log of another machine holds may be lost."""
        if self.ledgers[name].log_at not in (None, self.machine):
            self.endanger(name)

    def _way_out(
        self, name: str, error: ForebayError, tried: list[str], hints: list[str], again: int
    ) -> None:
        """Does what the error asks for: runs a command that it names, or tries again."""
        commands = [*commands_in(str(error)), *hints]
        text = str(error)
        if not commands:
            kinds = (ServiceError, TopicOwned, TopicFenced, LogStopped, LogClosed, LogLocked)
            if isinstance(error, kinds) and again <= REOPENINGS_MAX:
                if isinstance(error, TopicOwned):
                    self.nobody()
                return
            raise Broken("no way out", f"{type(error).__name__}: {text} (tried {tried})")
        while True:
            left = [each for each in commands if tried.count(each) < 3]
            command = min(left, key=tried.count, default=None)
            if command is None or len(tried) >= COMMANDS_MAX:
                raise Broken("no way out", f"{text} (tried {tried})")
            tried.append(command)
            try:
                hints[:] = self.command(name, command)
            except ForebayError as refused:
                text = str(refused)
                self.say(f"`{command}` refused: {text}")
                commands = [*commands_in(text, command), *commands]
                continue
            return

    def command(self, name: str, text: str) -> list[str]:
        """Runs a command on a store that nobody has open; returns commands that it names itself."""
        self.nobody()
        command, *words = text.split()
        flags = {word.removeprefix("--").replace("-", "_") for word in words}
        with self.other() as worker:
            if command == "restore":
                self.say(
                    f"{text}: {worker.ask('job', 'restore', name, self._choices(name, flags))}"
                )
            elif command == "repair":
                done, left = worker.ask("job", "repair", name, "accept_loss" in flags)
                self.say(f"{text}: {done}")
                return [each for remedy in left for each in commands_in(remedy, text)]
            elif command == "sweep":
                self.say(f"{text}: {worker.ask('job', 'sweep', name)}")
            else:
                self.say(f"{text}: {worker.ask('job', 'accept', name)}")
        return []

    def _choices(self, name: str, flags: set[str]) -> dict[str, Any]:
        """The flags of a restore, but for those that would assert what is false."""
        choices: dict[str, Any] = dict.fromkeys(flags, True)
        known = self.ledgers[name].known
        after = max(known, default=-1) + 1
        if not known.keys() <= self.stored(name).keys():
            choices.pop("assume_nothing_lost", None)
        if choices.pop("next_offset", False) and "assume_nothing_lost" not in choices:
            choices["next_offset"] = after
        return choices

    def led(self, name: str, action: Callable[[Worker], _Result]) -> _Result:
        """Returns what the action does with an owner, after whatever its errors ask for."""
        tried: list[str] = []
        hints: list[str] = []
        again = 0
        while True:
            owner = self.open(name)
            try:
                return action(owner)
            except ProcessDied:
                raise Broken("a process died", "and nobody killed it") from None
            except ForebayError as error:
                self.say(f"{name}: refused: {type(error).__name__}: {error}")
                self._opened.discard(name)
                again += 1
                self._way_out(name, error, tried, hints, again)
            finally:
                if self.owner is not None:
                    self.collect(self.owner)

    # -- what is stored, seen without the product -------------------------------------------------

    def stored(self, name: str) -> dict[int, int]:
        """The numbers of the messages, by offset, that nothing but damage can take away.

        They are in sound objects that are committed, or that a restore would take. An object that
        was never committed and overlaps others in part may have to give way to those.
        """
        found: dict[int, int] = {}
        with closing(self.place.catalog()) as catalog:
            chain = {each.object_id for each in raw_descriptors(catalog, parse_topic(name))}
        keys = self._object_keys(name)
        for key, own in keys.items():
            if key not in self._sound:
                with suppress(ForebayError):  # a sweep was faster
                    self._sound[key] = self._messages(key, own.start, own.end)
            committed = key.rpartition("/")[2] in chain
            apart = not any(
                _overlaps_in_part(own, each)
                or (
                    other.rpartition("/")[2] in chain
                    and each.start <= own.end
                    and own.start <= each.end
                )
                for other, each in keys.items()
            )
            if apart or committed:
                found |= self._sound.get(key, {})
        return found

    def _object_keys(self, name: str) -> dict[str, ObjectName]:
        listed = self.place.store.list(objects_prefix(parse_topic(name)))
        parsed = ((meta.key, self._own(meta.key)) for meta in listed)
        return {key: own for key, own in parsed if own is not None}

    def _own(self, key: str) -> ObjectName | None:
        """The offsets of an object, by its name or, of a ledger, by its index object."""
        prefix, _, name = key.rpartition("/")
        ledger = parse_ledger(name)
        if ledger is None or ledger.is_index:
            return parse_object(name)
        if key not in self._ledgers:
            with suppress(ObjectMissing, LedgerError):
                index = self.place.store.get_object(f"{prefix}/{ledger.index_name}", 1 << 24)
                span = offsets_of_ledger(decode_index(index))
                assert span is not None
                self._ledgers[key] = ObjectName(span[0], span[1] - 1)
        return self._ledgers.get(key)

    def _messages(self, key: str, start: int, end: int) -> dict[int, int]:
        raw = bytes(self.place.store.get_object(key, 1 << 24))
        if key in self._ledgers:
            return self._entries(raw, start, end)
        frames = scan(raw)
        if frames.safe_length != len(raw) or list(frames.offsets) != list(range(start, end + 1)):
            return {}
        return {each.offset: number_of(each.payload) for each in decode_messages(frames)}

    def _entries(self, raw: bytes, start: int, end: int) -> dict[int, int]:
        entries = EntryAssembler(start, 0, len(raw), start, max(len(raw), 1))
        found = {
            each.offset: number_of(each.payload)
            for frames in entries.feed(raw)
            for each in decode_messages(frames)
        }
        entries.require_end(end + 1)
        return found if entries.corruption is None else {}

    def endanger(self, name: str, offsets: Iterable[int] | None = None) -> None:
        """Messages may be lost: these, or all that are not in the bucket."""
        ledger = self.ledgers[name]
        gone = offsets if offsets is not None else ledger.known.keys() - self.stored(name).keys()
        ledger.endangered |= {offset for offset in gone if offset >= ledger.retired}

    def record(self, name: str) -> TopicRecord | None:
        with closing(self.place.catalog()) as catalog:
            return catalog.record(parse_topic(name))

    def accepted(self, name: str) -> tuple[tuple[int, int], ...]:
        """The ranges over which readers jump. At all other holes they must raise."""
        record = self.record(name)
        return () if record is None else record.accepted

    def known(self, name: str) -> list[int]:
        return sorted(self.ledgers[name].known)

    def log_folder(self, machine: str, name: str) -> Path:
        topic = parse_topic(name)
        return self.place.folder / machine / "wal" / topic.namespace / topic.topic

    # -- steps ------------------------------------------------------------------------------------

    def take(self, step: Step) -> None:
        self.say(f"-- {step}")
        name = TOPICS[step.number % 2]
        began = time.monotonic()
        getattr(self, f"do_{step.name}")(name, step.number // 2)
        self.outcomes[step.name] += 1
        self.seconds[step.name] += time.monotonic() - began

    def numbers(self, name: str, count: int) -> list[int]:
        self._number += count
        found = list(range(self._number - count, self._number))
        self.ledgers[name].attempted |= set(found)
        return found

    def do_append(self, name: str, number: int) -> None:
        way = WAYS[number % len(WAYS)]
        count = 1 + number // len(WAYS) % 12
        self.led(name, lambda owner: owner.ask("append", name, way, self.numbers(name, count)))

    def do_upload(self, name: str, _number: int) -> None:
        self.led(name, lambda owner: owner.ask("upload", name))

    def do_upload_due(self, name: str, _number: int) -> None:
        self.led(name, lambda owner: owner.ask("upload_due", name))

    def _tolerated(self, name: str, *question: Any) -> Any:
        """Asks the owner; a refusal is an answer, because something may be missing or damaged."""
        owner = self.open(name)
        try:
            done = owner.ask(*question)
        except ForebayError as error:
            self.say(f"{question}: {type(error).__name__}: {error}")
            self.outcomes[f"{question[0]} refused"] += 1
            self._opened.discard(name)
            return None
        finally:
            self.collect(owner)
        self.outcomes[f"{question[0]} done"] += 1
        return done

    def do_trim(self, name: str, _number: int) -> None:
        self._tolerated(name, "trim", name)

    def do_retain(self, name: str, _number: int) -> None:
        ledger = self.ledgers[name]
        ledger.retaining = True
        start = self._tolerated(name, "retain", name)
        if start is not None:
            ledger.retired = max(ledger.retired, start)
            ledger.retaining = False

    def do_read(self, name: str, number: int) -> None:
        way = ("read", "stream")[number % 2]
        reading = self.led(name, lambda owner: owner.ask("read", name, way, self.known(name)))
        self.ledgers[name].check(reading, self.accepted(name), f"read by {way}")

    def do_view(self, name: str, number: int) -> None:
        """Reads from another process: with a view, or as Spark's tasks do."""
        self.open(name)
        how = ("view", "scan")[number % 2]
        with self.other() as worker:
            try:
                reading = worker.ask(how, name, self.known(name))
            except ForebayError as error:
                # An older catalog brings back what retention had removed, damaged or not.
                if not self.ledgers[name].endangered and not self.ledgers[name].damaged:
                    raise Broken("a view fails", str(error)) from error
                return
        self.ledgers[name].check(reading, self.accepted(name), f"read by {how}")

    def do_reopen(self, name: str, _number: int) -> None:
        self.close_owner()
        self.open(name)

    def do_close(self, _name: str, _number: int) -> None:
        self.nobody()

    def do_kill(self, name: str, number: int) -> None:
        """kill -9 in the middle of appends."""
        self._burst(name, number)
        self.lose_owner()

    def _burst(self, name: str, number: int) -> Worker:
        """Returns the owner, which appends on and on, and has acknowledged some of it."""
        owner = self.open(name)
        first = self.numbers(name, 2000)[0]
        owner.begin("burst", name, first)
        with suppress(ForebayError):
            owner.finish(acks_max=1 + number % 20)
        return owner

    def do_kill_at(self, name: str, number: int) -> None:
        """kill -9 at a call of the store or of the catalog."""
        number, which = divmod(number, len(FATAL))
        death = {"death": 1 + number % 40}
        kind, question = FATAL[which][0], FATAL[which][1:]
        if kind == "open":
            self.nobody()
            self.owner = self.spawn()
            self.owner.ask("faults", death, None)
            self._take_over(name)
            with suppress(ForebayError, ProcessDied):
                self.owner.ask("open", name)
            self.ledgers[name].log_at = self.machine
            self.lose_owner()
        elif kind == "owner":
            self._killed_owner(name, death, question)
        else:
            if kind == "alone":
                self.nobody()
            else:
                self.open(name)
            with self.other(fatal=True) as worker:
                worker.ask("faults", death, None)
                with suppress(ForebayError, ProcessDied):
                    worker.ask("job", *self._filled(name, question))
            self.place.end_leases() if kind == "alone" else None

    def _filled(self, name: str, question: Sequence[Any]) -> list[Any]:
        made = {"TOPIC": name, "TABLE": self.table(name), "CHOICES": self._choices(name, set())}
        return [made.get(each, each) if isinstance(each, str) else each for each in question]

    def table(self, name: str) -> Path:
        return self.place.folder / "tables" / parse_topic(name).topic

    def _killed_owner(self, name: str, death: Mapping[str, int], question: Sequence[Any]) -> None:
        owner = self.open(name)
        if question[0] == "retain":
            self.ledgers[name].retaining = True
        asked = [question[0], name, *question[1:]]
        if question[0] == "append":
            asked.append(self.numbers(name, 5))
        elif question[0] == "close":
            asked = ["close"]
        with suppress(ForebayError, ProcessDied):
            owner.ask("faults", death, None)
            owner.ask(*asked)
        self.lose_owner()

    def do_move(self, name: str, number: int) -> None:
        """Another machine goes on: after a close or a kill, mostly with everything uploaded."""
        self._save(number)
        if number // 4 % 2:
            self.nobody()
        else:
            self.lose_owner()
            self.place.end_leases()
        self.machine = MACHINES[1 - MACHINES.index(self.machine)]
        self.open(name)

    def _save(self, number: int) -> None:
        """Mostly uploads everything, so that what comes next must not lose it."""
        for name in TOPICS if number % 8 else ():
            self.do_upload(name, 0)

    def do_stop(self, name: str, number: int) -> None:
        """SIGSTOP past the lease; another machine takes the topic over; SIGCONT."""
        first = self._burst(name, number)
        while True:
            first.stop()
            stopped_at = time.monotonic()
            if not self.place.held_up():
                break
            first.signal(signal.SIGCONT)
            with suppress(ForebayError, ProcessDied):
                first.finish(acks_max=1)
        self.collect(first)
        self.owner = None
        self._opened.clear()
        self.machine = MACHINES[1 - MACHINES.index(self.machine)]
        try:
            self.led(name, lambda owner: owner.ask("append", name, "many", self.numbers(name, 3)))
            if not first.stopped:
                raise Broken("no test", f"somebody else has continued process {first.pid}")
        finally:
            first.signal(signal.SIGCONT)
        with suppress(ForebayError, ProcessDied):
            first.finish()
        late = [ack for ack in first.acks if ack[3] > stopped_at]
        if late:
            raise Broken("a fenced process acknowledges", f"{late[:3]}")
        self.collect(first, endangered=True)
        self._end(first)

    def _job(self, name: str, *question: Any) -> Any:
        """A job in a process of its own, beside the owner."""
        self.open(name)
        with self.other() as worker:
            try:
                done = worker.ask("job", *question)
            except ForebayError as error:
                self.say(f"{question}: {type(error).__name__}: {error}")
                self.outcomes[f"{question[0]} refused"] += 1
                return None
        self.say(f"{question}: {done}")
        self.outcomes[f"{question[0]} done"] += 1
        return done

    def do_offload(self, name: str, _number: int) -> None:
        self._job(name, "offload")

    def do_compact(self, name: str, number: int) -> None:
        self._job(name, "compact", (5000, 20_000)[number % 2])

    def do_undo(self, name: str, _number: int) -> None:
        self._job(name, "undo", name)

    def do_sweep(self, name: str, number: int) -> None:
        self._job(name, "sweep", *([name] if number % 2 else []))

    def do_verify(self, name: str, _number: int) -> None:
        found = self._job(name, "verify")
        if found and not any(ledger.damaged for ledger in self.ledgers.values()):
            errors = [each for each in found if "error" in each.lower()]
            self.say(f"verify found {errors}")

    def do_export(self, name: str, _number: int) -> None:
        end = self._job(name, "export", name, self.table(name))
        if end is not None:
            self.ledgers[name].exported = end
            self.check_table(name)

    def do_race(self, name: str, number: int) -> None:
        """The owner and two jobs at the same time."""
        owner = self.open(name)
        jobs = [RACING[number % len(RACING)], RACING[number // len(RACING) % len(RACING)]]
        with self.other() as one, self.other() as two:
            for worker, question in zip((one, two), jobs, strict=True):
                worker.begin("job", *self._filled(name, question))
            for each in ("append", "upload", "trim", "append"):
                with suppress(ForebayError):
                    if each == "append":
                        owner.ask("append", name, "threads", self.numbers(name, 6))
                    else:
                        owner.ask(each, name)
            for worker in (one, two):
                with suppress(ForebayError):
                    worker.finish()
        self.collect(owner)
        self._opened.discard(name)

    def do_full(self, name: str, number: int) -> None:
        """The disk of the log is full, and then it is not."""
        owner = self.open(name)
        owner.ask("faults", {}, number % 1500)
        ways = ("many", "synced", "async", "buffered")
        for at in range(3):
            with suppress(ForebayError):
                owner.ask("append", name, ways[(number + at) % 4], self.numbers(name, 4))
        with suppress(ForebayError):
            owner.ask("trim", name)
        owner.ask("faults", {}, None)
        self.collect(owner)
        self._opened.discard(name)

    def do_away(self, name: str, number: int) -> None:
        """The store or the catalog is away, loses responses, or is slow."""
        owner = self.open(name)
        where = ("store", "catalog")[number % 2]
        how = ("away", "lost", "slow")[number // 2 % 3]
        work = UNDER_FAULTS[number // 6 % len(UNDER_FAULTS)]
        self._faulty = True
        try:
            with self.place.faults(owner, where, how):
                for each in work:
                    if each == "retain":
                        self.ledgers[name].retaining = True
                    question = [each, name]
                    if each == "append":
                        question += ["many", self.numbers(name, 4)]  # type: ignore[list-item]
                    with suppress(ForebayError, ProcessDied):
                        owner.ask(*question)
                if number // 60 % 4 == 0:
                    with suppress(ForebayError, ProcessDied):
                        owner.ask("close")
        finally:
            self._faulty = False
        self.collect(owner)
        self._opened.clear()

    def do_spark(self, name: str, number: int) -> None:
        """A job, a read or a write on Spark; without a session, a job on threads."""
        if self._spark is None:
            self._job(name, "offload")
            return
        from support.walk_spark import on_spark

        work = ("offload", "compact", "verify", "read", "write")[number % 5]
        if work == "write":  # there is no server: the sink owns the topic while it writes
            self.nobody()
        else:
            self.open(name)
        numbers = self.numbers(name, 8) if work == "write" else []
        try:
            reading = on_spark(self._spark, self.place.settings(self.machine), work, name, numbers)
        except ForebayError as error:
            self.say(f"{work} on Spark: {error}")
            self.outcomes[f"{work} on Spark refused"] += 1
            return
        self.outcomes[f"{work} on Spark done"] += 1
        if reading is not None:
            record = self.record(name)
            holes = () if record is None else record.holes  # for it was told to skip them
            self.ledgers[name].check(reading, holes, "read by Spark")
        if work == "write":
            self.place.end_leases()
            self.do_read(name, 0)
            missing = set(numbers) - self.ledgers[name].offsets.keys()
            if missing:
                raise Broken("the sink lost rows", f"{missing}")

    # -- disasters --------------------------------------------------------------------------------

    def do_copy(self, _name: str, _number: int) -> None:
        """A backup of the logs and of the catalog, while nobody writes."""
        self.nobody()
        at = self.place.folder / "copies" / str(len(self._copies))
        logs = {}
        for machine in MACHINES:
            log = self.place.folder / machine / "wal"
            if log.exists():
                shutil.copytree(log, at / machine)
                logs[machine] = at / machine
        openings = dict(self._openings)
        self._copies.append(Copy(logs, self.place.copy_catalog(), openings))

    def do_put_back(self, _name: str, number: int) -> None:
        """An older backup of the logs, of the catalog, or of both."""
        if not self._copies:
            return
        copy = self._copies[number % len(self._copies)]
        later = [self._openings[name] > copy.openings.get(name, 0) for name in TOPICS]
        if not all(later):
            return  # nothing in the bucket shows that the copy is old
        self._save(number)
        self.nobody()
        what = number // 7 % 3
        if what != 1:
            for name in TOPICS:
                self.endanger(name)
            for machine in MACHINES:
                log = self.place.folder / machine / "wal"
                shutil.rmtree(log, ignore_errors=True)
                if machine in copy.logs:
                    shutil.copytree(copy.logs[machine], log)
        if what != 0:
            self.place.put_back_catalog(copy.catalog)
        self.say(f"put back {('logs', 'catalog', 'both')[what]}")

    def do_lose_log(self, name: str, number: int) -> None:
        self._save(number)
        self.lose_owner()
        self.place.end_leases()
        self.endanger(name)
        shutil.rmtree(self.log_folder(self.machine, name), ignore_errors=True)

    def do_lose_catalog(self, _name: str, number: int) -> None:
        self._save(number)
        self.nobody()
        self.place.lose_catalog()
        if number // 4 % 4 == 0:  # the disk was lost with everything on it
            for name in TOPICS:
                self.endanger(name)
            shutil.rmtree(self.place.folder / self.machine, ignore_errors=True)

    def do_harm_segment(self, name: str, number: int) -> None:
        self.nobody()
        segments = sorted(self.log_folder(self.machine, name).glob("wal*.log"))
        if not segments:
            return
        path = segments[number % len(segments)]
        raw = path.read_bytes()
        if not raw:
            return
        self.endanger(name)
        self.endanger(name, scan(raw).offsets)  # readers raise, even if an object holds them too
        at = number * 31 % len(raw)
        if number // 8 % 2:
            path.write_bytes(raw[:at])
        else:
            path.write_bytes(raw[:at] + bytes([raw[at] ^ 4]) + raw[at + 1 :])
        self.say(f"harmed {path.name} at {at}")

    def do_harm_object(self, name: str, number: int) -> None:
        if number % 2:
            self.nobody()
        keys = list(self._object_keys(name))
        if not keys:
            return
        key = keys[number // 2 % len(keys)]
        parsed = self._own(key)
        assert parsed is not None
        raw = bytes(self.place.store.get_object(key, 1 << 24))
        self._sound[key] = {}
        self.endanger(name, self._entangled(keys, parsed.start, parsed.end))
        self.ledgers[name].damaged.add(key)
        at = number * 31 % len(raw)
        how = number // 16 % 3
        if how == 0:
            self.place.store.delete_object(key)
        elif how == 1:
            self.place.store.put_object(key, raw[:at] + bytes([raw[at] ^ 4]) + raw[at + 1 :])
        else:
            self.place.store.put_object(key, raw[:at])
        self.say(f"{('deleted', 'flipped', 'cut')[how]} {key} at {at}")

    def _entangled(self, keys: list[str], start: int, end: int) -> range:
        """The offsets of all objects that overlap these, and those that overlap them, and so on.

        Objects that were never committed may be cut at other offsets. A restore takes whole
        objects, so where one is damaged, it has to give up others that overlap what it takes.
        """
        names = [name for key in keys if (name := self._own(key))]
        while wider := [
            each
            for each in names
            if each.start <= end and each.end >= start
            if each.start < start or each.end > end
        ]:
            start = min(start, *(each.start for each in wider))
            end = max(end, *(each.end for each in wider))
        return range(start, end + 1)

    def do_repair(self, name: str, number: int) -> None:
        with suppress(ForebayError):
            self.command(name, "repair --accept-loss" if number % 4 == 0 else "repair")

    def do_restore(self, name: str, number: int) -> None:
        names = ("allow-gaps", "verify", "assume-nothing-lost", "next-offset", "accept-loss")
        flags = [f"--{each}" for at, each in enumerate(names) if number >> at & 1]
        with suppress(ForebayError):
            self.command(name, " ".join(["restore", *flags]))

    def do_accept(self, name: str, _number: int) -> None:
        self._job(name, "accept", name)

    # -- the end ----------------------------------------------------------------------------------

    def finish(self) -> None:
        """Whatever has happened, everything works, and nothing is left over."""
        for name in TOPICS:
            self.do_append(name, 1)
            self.do_upload(name, 0)
            self.do_accept(name, 0)
            self.do_read(name, 0)
            self.do_reopen(name, 0)
            self.do_append(name, 1)
            self.do_upload(name, 0)
        for name in TOPICS:
            self.do_read(name, 1)
            self.do_view(name, 0)
            self.do_view(name, 1)
        self.nobody()
        with self.other() as worker:
            for name in TOPICS:  # one sweep for objects, one for what they held up
                worker.ask("job", "sweep", name)
                worker.ask("job", "sweep", name)
        for name in TOPICS:
            self.check_bucket(name)

    def check_bucket(self, name: str) -> None:
        """The bucket is the union of the descriptors, and of the markers."""
        topic, ledger = parse_topic(name), self.ledgers[name]
        prefix = objects_prefix(topic)
        with closing(self.place.catalog()) as catalog:
            chain = list(raw_descriptors(catalog, topic))
            record = catalog.record(topic)
        assert record is not None
        wanted = {prefix + file for each in chain for file in object_files(each.object_id)}
        found = {meta.key: meta.size for meta in self.place.store.list(prefix)}
        for each in chain:
            key = prefix + each.object_id
            if found.get(key) != each.size and key not in ledger.damaged:
                raise Broken("an object is not there", f"{each}: {found.get(key)}")
        at = record.start_offset
        for each in chain:
            hole = next((hole for hole in record.holes if hole[0] <= at < hole[1]), None)
            at = at if hole is None else hole[1]
            if each.start_offset != at:
                raise Broken("the chain has a gap or an overlap", f"{at}: {chain}")
            at = each.next_offset
        sidecars = {key + SIDECAR_ENDING for key in wanted | ledger.damaged}
        left = {
            key
            for key in found.keys() - wanted - sidecars
            if "/begin-" not in key and not self._may_be_last(name, key)
        }
        if left:
            raise Broken("orphans are left", f"{sorted(left)}; {record}; {chain}")

    def _may_be_last(self, name: str, key: str) -> bool:
        """Whether an object was damaged, or overlaps one that was: a sweep keeps the only copy."""
        prefix, slash, file = key.rpartition("/")
        own = self._own(prefix + slash + object_of_file(file))
        damaged = [self._own(each) for each in self.ledgers[name].damaged]
        return own is not None and any(
            each is not None and each.start <= own.end and own.start <= each.end for each in damaged
        )

    def check_table(self, name: str) -> None:
        """The exported table has each message once."""
        ledger = self.ledgers[name]
        rows = rows_of(self.table(name), ledger.rows)
        offsets = [offset for offset, _ in rows]
        if len(set(offsets)) != len(offsets):
            twice = [offset for offset, count in Counter(offsets).items() if count > 1]
            raise Broken("a row is in the table twice", f"{twice[:9]}")
        for offset, value in rows:
            # Not learned: the row may be of a batch that was exported before its message was lost.
            ledger.compare(offset, number_of(value), "exported")
        assert ledger.exported is not None
        missing = [
            offset
            for offset in ledger.known.keys() - set(offsets)
            if offsets and offsets[0] <= offset < ledger.exported
            if offset not in ledger.endangered and offset >= ledger.retired
        ]
        if missing:
            raise Broken("a message is not in the table", f"{sorted(missing)[:9]}")

    def close(self) -> None:
        for worker in self._workers:
            worker.close()


FATAL: Final[tuple[tuple[Any, ...], ...]] = (
    ("open",),
    ("owner", "append", "uploaded"),
    ("owner", "append", "many"),
    ("owner", "upload"),
    ("owner", "upload_due"),
    ("owner", "trim"),
    ("owner", "retain"),
    ("owner", "close"),
    ("beside", "offload"),
    ("beside", "compact", 8000),
    ("beside", "sweep"),
    ("beside", "undo", "TOPIC"),
    ("beside", "export", "TOPIC", "TABLE"),
    ("alone", "restore", "TOPIC", "CHOICES"),
    ("alone", "repair", "TOPIC", False),
)
"""What a process does when it is killed: as the owner, beside the owner, or with nobody else."""
RACING: Final[tuple[tuple[Any, ...], ...]] = (
    ("offload",),
    ("compact", 8000),
    ("sweep",),
    ("undo", "TOPIC"),
    ("export", "TOPIC", "TABLE"),
    ("verify",),
)
UNDER_FAULTS: Final = (
    ("append", "upload"),
    ("append", "upload_due", "append"),
    ("upload", "trim"),
    ("retain", "append"),
    ("append",),
)
WEIGHTS: Final = {
    "append": 400,
    "upload": 70,
    "upload_due": 30,
    "trim": 50,
    "retain": 12,
    "read": 50,
    "view": 40,
    "reopen": 20,
    "close": 6,
    "kill": 25,
    "kill_at": 50,
    "move": 10,
    "stop": 1,
    "offload": 28,
    "spark": 2,
    "compact": 30,
    "undo": 10,
    "sweep": 25,
    "verify": 5,
    "export": 5,
    "race": 14,
    "full": 12,
    "away": 25,
    "copy": 5,
    "put_back": 3,
    "lose_log": 2,
    "lose_catalog": 4,
    "harm_segment": 2,
    "harm_object": 2,
    "repair": 3,
    "restore": 3,
    "accept": 3,
}


def steps_of(seed: int, count: int, **weights: int) -> list[Step]:
    """The steps of a seed; `weights` replace some of those above."""
    dice = random.Random(seed)
    chosen = WEIGHTS | weights
    names = dice.choices([*chosen], [*chosen.values()], k=count)
    return [Step(name, dice.randrange(1 << 24)) for name in names]


def run(
    place: Place, nursery: Nursery, steps: Sequence[Step], spark: SparkSession | None = None
) -> Walk:
    """Carries the steps out, and closes the place. Raises Broken, with what happened as a note."""
    walk = Walk(place, nursery, spark)
    taken = 0
    try:
        for step in steps:
            walk.take(step)
            taken += 1
        walk.finish()
    except Exception as error:  # noqa: BLE001  # raised below, with what happened before
        broken = error
        if not isinstance(error, Broken):
            broken = Broken(f"{type(error).__name__} was raised", str(error))
            broken.__cause__ = error
        broken.add_note("\n".join([f"after {taken} steps", *walk.trail[-TRAIL_MAX:]]))
        raise broken from broken.__cause__
    finally:
        walk.close()
        place.close()
    return walk


def main() -> None:
    parser = argparse.ArgumentParser(description="Takes a walk with one seed, or with several.")
    parser.add_argument("seed", type=int)
    parser.add_argument("count", type=int, nargs="?", default=1, help="seeds from this one on")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--remote", action="store_true", help="on a real S3 server and etcd")
    parser.add_argument("--times", action="store_true", help="say how long each kind of step takes")
    given = parser.parse_args()
    failures = 0
    with ExitStack() as stack:
        memory = Path("/dev/shm")
        parent = memory if memory.is_dir() else None
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=parent)))
        servers: tuple[S3Server, EtcdServer] | None = None
        if given.remote:
            s3 = stack.enter_context(S3Server(folder))
            etcd = EtcdServer(folder / "etcd").start()
            stack.callback(etcd.stop)
            servers = (s3, etcd)
        nursery = Nursery(folder / "nursery.log")
        stack.callback(nursery.close)
        for seed in range(given.seed, given.seed + given.count):
            began = time.monotonic()
            place: Place
            if servers is None:
                place = LocalPlace(folder / str(seed), seed)
            else:
                place = RemotePlace(folder / str(seed), seed, *servers)
            try:
                walk = run(place, nursery, steps_of(seed, given.steps))
            except Broken as error:
                failures += 1
                notes = "\n".join(error.__notes__)
                log = (folder / "nursery.log").read_text()[-3000:]
                sys.stdout.write(f"seed {seed}: {error}\n{notes}\n{log}\n")
            else:
                counts = {
                    name: f"{len(ledger.known)} known, {len(ledger.endangered)} endangered"
                    for name, ledger in walk.ledgers.items()
                }
                seconds = time.monotonic() - began
                sys.stdout.write(f"seed {seed}: {given.steps} steps in {seconds:.1f} s, {counts}\n")
                if given.times:
                    for name, spent in sorted(walk.seconds.items(), key=lambda item: -item[1]):
                        count = walk.outcomes[name]
                        sys.stdout.write(f"  {name:12} {count:5} {1000 * spent / count:8.1f} ms\n")
                    sys.stdout.write(f"  {dict(walk.outcomes)}\n")
            sys.stdout.flush()
            shutil.rmtree(folder / str(seed), ignore_errors=True)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
