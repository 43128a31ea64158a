"""A store as an older release wrote it, and the program that wrote it.

    python -m support.older_store VERSION     (in `tests`, with that release of Forebay)

writes `stores/store-VERSION.tar.gz`: a data directory with `wal`, `objects` and `catalog.db`, and
`messages.json`, which names every message that must be readable. Each topic is in another state.
An archive is never made again: a later release must read what the older one wrote.

Beware: nothing in an archive may name the machine that made it. The maker replaces the host's name
and the boot id, and searches the result for paths.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from forebay.catalog.catalog import Catalog
from forebay.catalog.job_state import write_job_state
from forebay.catalog.kv import Remove
from forebay.errors import ForebayError
from forebay.format.names import TopicName, after_prefix, parse_topic
from forebay.objects.store import CloudStore
from forebay.settings import (
    DeleterSettings,
    RemoteRetentionSettings,
    StoreSettings,
    UploaderSettings,
    WalSettings,
)
from forebay.topic.resources import StoreResources, open_resources
from forebay.topic.store import Store, Topic
from support.paths import SUPPORT
from support.storages import storage_of

STORES: Final = SUPPORT / "stores"
MESSAGES: Final = "messages.json"
HOST: Final = "broker-1"
BOOT: Final = "00000000-0000-4000-8000-000000000000"

LOGGED: Final = "/default/logged"
UPLOADED: Final = "/default/uploaded"
MIXED: Final = "/default/mixed"
COMPACTED: Final = "/default/compacted"
LOST: Final = "/default/lost"
RETAINED: Final = "/default/retained"
RESTORED: Final = "/default/restored"
RESTORED_BARE: Final = "/default/restored-bare"
INTERRUPTED: Final = "/default/interrupted"
ROLLING: Final = "/default/rolling"
PENDING: Final = "/default/pending"
CRASHED: Final = "/default/crashed"
PARTITIONS: Final = ("/default/clicks-part-0", "/default/clicks-part-1")
EMPTY: Final = "/default/empty"

CURSOR: Final = ("billing", 17)
JOB_STATE: Final = ("sink/daily", b'{"batch":3}')


@dataclass
class OlderTopic:
    """What must be true of one topic of an archive."""

    next_offset: int = 0
    """Every offset below was given to a message, or may have been."""
    start_offset: int = 0
    lost: list[tuple[int, int]] = field(default_factory=list)
    messages: dict[int, dict[str, Any]] = field(default_factory=dict)
    """By offset: payload, attributes and routing key, and whether only the log has it."""
    refused: bool = False
    """Whether it must be restored before it opens."""

    def payload(self, offset: int) -> bytes:
        found: str = self.messages[offset]["payload"]
        return found.encode()

    def uploaded(self) -> list[int]:
        """The offsets of messages that objects hold."""
        return [offset for offset, each in self.messages.items() if not each["only_in_log"]]


def unpack(version: str, folder: Path) -> dict[str, OlderTopic]:
    """Unpacks the archive to `folder`, and returns what it says about its topics."""
    with tarfile.open(STORES / f"store-{version}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    found = json.loads((folder / MESSAGES).read_text(encoding="utf-8"))
    return {name: _decoded(body) for name, body in found.items()}


def _decoded(body: dict[str, Any]) -> OlderTopic:
    return OlderTopic(
        body["next_offset"],
        body["start_offset"],
        [(start, end) for start, end in body["lost"]],
        {int(offset): each for offset, each in body["messages"].items()},
        body["refused"],
    )


def settings_of(data: Path, **parts: Any) -> StoreSettings:
    """With segments and objects of a few messages, and nothing in the background."""
    chosen: dict[str, Any] = {
        "wal": WalSettings(rotate_max_bytes=1200),
        "uploader": UploaderSettings(enabled=False, max_object_bytes=2000),
        "deleter": DeleterSettings(
            retention_time_minutes=0, retention_size_mb=0, deletion_lag_minutes=0
        ),
    }
    return StoreSettings(data=data, **{**chosen, **parts})


# ---- the maker ----


class Maker:
    """Fills a data directory, and keeps account of every message."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self.topics: dict[str, OlderTopic] = {}

    def run(self) -> None:
        for make in (
            self.make_logged,
            self.make_tiers,
            self.make_compacted,
            self.make_lost,
            self.make_retained,
            self.make_restored,
            self.make_states,
        ):
            make()
        child = os.fork()
        if child == 0:  # it dies with its topics open
            self.die()
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 7
        dead = json.loads((self.data / "dead.json").read_text(encoding="utf-8"))
        (self.data / "dead.json").unlink()
        self.topics |= {name: _decoded(body) for name, body in dead.items()}

    def open(self, **parts: Any) -> Store:
        return Store(settings_of(self.data, **parts))

    def resources(self, **parts: Any) -> StoreResources:
        return open_resources(settings_of(self.data, **parts))

    def fill(self, topic: Topic, count: int) -> None:
        """Appends so many messages; some have attributes, some have a routing key."""
        older = self.topics.setdefault(topic.name, OlderTopic())
        first = topic.watermarks().appended
        for start in range(first, first + count, 5):
            wanted = range(start, min(start + 5, first + count))
            said = [_message(topic.name, offset) for offset in wanted]
            done = topic.append_many(
                [each["payload"].encode() for each in said],
                [each["attributes"] for each in said],
                [each["routing_key"] for each in said],
                durability="synced",
            )
            assert done == wanted
            older.messages |= dict(zip(wanted, said, strict=True))
        older.next_offset = first + count

    def upload(self, topic: Topic) -> None:
        topic.upload()
        older = self.topics[topic.name]
        assert topic.watermarks().verified == topic.watermarks().uploaded
        for offset, each in older.messages.items():
            if offset < topic.watermarks().uploaded:
                each["only_in_log"] = False

    # -- one after the other --------------------------------------------------------------------

    def make_logged(self) -> None:
        with self.open() as store:
            self.fill(store.topic(LOGGED), 30)
            store.topic(EMPTY)
            self.topics[EMPTY] = OlderTopic()
            for name, count in zip(PARTITIONS, (12, 7), strict=True):
                self.fill(store.topic(name), count)
                self.upload(store.topic(name))

    def make_tiers(self) -> None:
        with self.open() as store:
            topic = store.topic(UPLOADED)
            self.fill(topic, 40)
            self.upload(topic)
            topic.rotate()
            topic.trim_local()
            topic = store.topic(MIXED)
            for count in (20, 15, 1):
                self.fill(topic, count)
                self.upload(topic)
            assert topic.trim_local()
            self.fill(topic, 25)
            assert len(topic.segments()) > 1

    def make_compacted(self) -> None:
        from forebay.pipeline.jobs.compact import compact  # needs Spark's package
        from support.inline_executor import InlineExecutor

        with self.open() as store:
            for count in (4, 5, 6, 3):
                self.fill(store.topic(COMPACTED), count)
                self.upload(store.topic(COMPACTED))
        report = compact(
            settings_of(self.data), [COMPACTED], target_bytes=100_000, executor=InlineExecutor()
        )
        assert report.ok
        with self.open() as store:
            self.fill(store.topic(COMPACTED), 4)
            self.upload(store.topic(COMPACTED))
            self.fill(store.topic(COMPACTED), 3)

    def make_lost(self) -> None:
        with self.open() as store:
            self.fill(store.topic(LOST), 20)
            self.upload(store.topic(LOST))
            self.fill(store.topic(LOST), 5)
        shutil.rmtree(self.data / "wal" / "default" / "lost")
        older = self.topics[LOST]
        older.lost.append((20, 25))
        for offset in range(20, 25):
            del older.messages[offset]
        with self.open() as store:
            self.fill(store.topic(LOST), 10)
            self.upload(store.topic(LOST))
            self.fill(store.topic(LOST), 4)

    def make_retained(self) -> None:
        keep = RemoteRetentionSettings(size_mb=0.002)
        with self.open(remote_retention=keep) as store:
            topic = store.topic(RETAINED)
            self.fill(topic, 60)
            self.upload(topic)
            assert storage_of(topic).trim_remote()
            topic.trim_local()
            self.fill(topic, 3)
            older = self.topics[RETAINED]
            older.start_offset = topic.start_offset
            assert older.start_offset > 0
            for offset in range(older.start_offset):
                del older.messages[offset]

    def make_restored(self) -> None:
        with self.open() as store:
            for name in (RESTORED, RESTORED_BARE, INTERRUPTED):
                topic = store.topic(name)
                self.fill(topic, 12)
                self.upload(topic)
                self.fill(topic, 12)
                self.upload(topic)
                self.fill(topic, 4 if name == RESTORED else 0)
        shutil.rmtree(self.data / "wal" / "default" / "restored-bare")
        with closing(self.resources()) as resources:
            for name in (RESTORED, RESTORED_BARE, INTERRUPTED):
                _forget(resources.catalog, parse_topic(name))
            for name in (RESTORED, RESTORED_BARE):
                _restore(resources, name)
                record = resources.catalog.record(parse_topic(name))
                assert record is not None
                assert record.log_id is None
                if name == RESTORED_BARE:
                    self.topics[name].next_offset = record.reserved
            _restore(resources, INTERRUPTED, stop=True)
            self.topics[INTERRUPTED].refused = True

    def make_states(self) -> None:
        from forebay.pipeline.jobs.verify import verify

        with closing(self.resources()) as resources:
            resources.catalog.put_cursor(parse_topic(MIXED), *CURSOR)
            name, value = JOB_STATE
            write_job_state(resources.catalog, parse_topic(MIXED), name, value, expected=None)
        assert verify(settings_of(self.data), [MIXED], runner="threads").ok

    def die(self) -> None:
        """Dies with messages only in the log, an unfinished rolling object, and a pending one."""
        self.topics = {}
        store = self.open(uploader=UploaderSettings(enabled=False, rolling=True))
        topic = store.topic(ROLLING)
        self.fill(topic, 10)
        self.upload(topic)
        self.fill(topic, 10)
        storage_of(topic).upload_due()
        assert topic.watermarks().uploaded == 10
        topic = store.topic(CRASHED)
        self.fill(topic, 10)
        self.upload(topic)
        self.fill(topic, 9)
        topic = store.topic(PENDING)
        self.fill(topic, 10)
        self.upload(topic)
        self.fill(topic, 10)
        (self.data / "dead.json").write_text(_encoded(self.topics), encoding="utf-8")
        CloudStore.copy_or_rewrite = lambda *_given, **_options: os._exit(7)  # type: ignore[method-assign]
        topic.upload()


def _message(topic: str, offset: int) -> dict[str, Any]:
    return {
        "payload": f"{topic} {offset} ".ljust(40 + offset % 50, "."),
        "attributes": {"number": str(offset), "k": "v"} if offset % 3 == 0 else {},
        "routing_key": f"key-{offset % 4}" if offset % 2 else None,
        "only_in_log": True,
    }


def _encoded(topics: Mapping[str, OlderTopic]) -> str:
    body = {
        name: {
            "next_offset": each.next_offset,
            "start_offset": each.start_offset,
            "lost": each.lost,
            "refused": each.refused,
            "messages": each.messages,
        }
        for name, each in topics.items()
    }
    return json.dumps(body, indent=1)


def _forget(catalog: Catalog, topic: TopicName) -> None:
    """Removes everything that the catalog knows about the topic."""
    prefix = catalog.keys.topic(topic)
    entries = list(catalog.kv.range(prefix, after_prefix(prefix), limit=1000))
    assert entries
    assert catalog.kv.commit([], [Remove(entry.key) for entry in entries]) is not None


def _restore(resources: StoreResources, name: str, *, stop: bool = False) -> None:
    from forebay.upload.inventory import describe
    from forebay.upload.restore import RestoreChoices, restore_topic

    done = 0

    def describing(*arguments: Any, **options: Any) -> Any:
        nonlocal done
        done += 1
        if stop and done == 2:
            raise ForebayError("interrupted")
        return describe(*arguments, **options)

    with suppress(ForebayError):
        restore_topic(
            resources.catalog,
            resources.store,
            resources.session,
            parse_topic(name),
            RestoreChoices(),
            describe=describing,
        )
        assert not stop


# ---- the archive ----


def pack(data: Path, topics: Mapping[str, OlderTopic], target: Path) -> None:
    (data / MESSAGES).write_text(_encoded(topics), encoding="utf-8")
    target.parent.mkdir(exist_ok=True)
    with tarfile.open(target, "w:gz") as archive:
        for path in sorted(data.rglob("*")):
            if path.name.endswith("-shm"):
                continue  # SQLite's shared memory, made again from the file beside it
            archive.add(path, str(path.relative_to(data)), recursive=False, filter=_nobodys)


def _nobodys(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


def require_nothing_of_this_machine(data: Path, host: str, boot: str) -> None:
    """Owners are named `host:process:number`, and locks by the boot id."""
    for word in (f'"{host}:', boot, str(data.parent)):
        for path in data.rglob("*"):
            assert not path.is_file() or word.encode() not in path.read_bytes(), (word, path)


def main() -> None:
    (version,) = sys.argv[1:]
    target = STORES / f"store-{version}.tar.gz"
    assert not target.exists(), f"{target} exists, and is never made again"
    host, boot = socket.gethostname(), Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    from forebay.catalog import sqlite
    from forebay.topic import opening

    socket.gethostname = lambda: HOST
    sqlite._boot_id = lambda: BOOT
    opening._BOOT_ID = Path("none")  # type: ignore[misc]  # the lock is named by chance then
    with tempfile.TemporaryDirectory(prefix="older-store-") as folder:
        maker = Maker(Path(folder) / "data")
        maker.run()
        require_nothing_of_this_machine(maker.data, host, boot)
        pack(maker.data, maker.topics, target)
    print(f"{target.name}: {target.stat().st_size} bytes, {len(maker.topics)} topics")


if __name__ == "__main__":
    main()
