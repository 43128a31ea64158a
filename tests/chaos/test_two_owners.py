"""Two processes that both believe they own a topic: one was stopped past its lease.

The one that is continued is refused before it acknowledges anything, with an error that says why.
What it had uploaded is there, what it had not is an explicit lost range, and no offset has two
contents.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final, Literal

import pytest

import forebay
from forebay.catalog.catalog import Catalog
from forebay.catalog.connect import connect_kv
from forebay.catalog.kv import Put
from forebay.errors import ServiceUnavailable
from forebay.objects.store import connect
from forebay.settings import MetadataSettings, StoreSettings, UploaderSettings, WalSettings
from support.etcd_server import EtcdServer
from support.proxy import FaultProxy, Faults
from support.s3_server import S3Server
from support.store_workers import PATIENCE, Ack, WorkerProcess, as_json
from support.topic_evidence import (
    NAME,
    TOPIC,
    Contents,
    assert_chain,
    assert_each_committed_once,
    assert_only_orphans_are_swept,
    read_all,
)

pytestmark = pytest.mark.timeout(300)

LEASE_SECONDS: Final = 3.0
"""Of real time: a process that does not run for so long loses its lease."""
MARGIN_SECONDS: Final = 0.5
Backend = Literal["etcd", "sqlite"]


class Setup:
    """One catalog and one bucket, for stores of several data directories."""

    def __init__(self, folder: Path, s3: S3Server, metadata: MetadataSettings) -> None:
        self.folder = folder
        self.cloud = s3.settings(
            request_timeout_seconds=2, retry_timeout_seconds=PATIENCE, max_retries=20
        )
        self.metadata = metadata
        patient = replace(metadata, timeout_seconds=PATIENCE)
        self.catalog = Catalog(connect_kv(patient, None), str(metadata.prefix))
        self.impatient = connect_kv(replace(metadata, timeout_seconds=1), None)
        self.store = connect(self.cloud)
        self.s3_proxy = FaultProxy(s3.endpoint.removeprefix("http://"), http=True)
        self.etcd_proxy = FaultProxy(metadata.endpoints[0]) if metadata.endpoints else None

    def settings(self, name: str, *, proxied: bool = False) -> StoreSettings:
        """Nothing is uploaded or trimmed unless the test asks for it."""
        cloud, metadata = self.cloud, self.metadata
        if proxied:
            cloud = replace(cloud, options={**cloud.options, "endpoint": self.s3_proxy.url})
            if self.etcd_proxy is not None:
                metadata = replace(metadata, endpoints=(self.etcd_proxy.address,))
        return StoreSettings(
            self.folder / name,
            wal=WalSettings(rotate_max_bytes=16_384, cache_capacity=16),
            uploader=UploaderSettings(enabled=False),
            cloud=cloud,
            metadata=metadata,
        )

    def worker(self, name: str, *, proxied: bool = False) -> WorkerProcess:
        given = as_json(self.settings(name, proxied=proxied), name)
        return WorkerProcess(given, self.folder / f"{name}.err")

    def stop(self, worker: WorkerProcess) -> float:
        """Stops the process, at a moment when it does not hold the lock of SQLite's file.

        One that holds it keeps everybody out until it goes on, whatever becomes of its lease.
        """
        while True:
            stopped_at = worker.stop()
            try:
                self.impatient.commit([], [Put(f"{self.metadata.prefix}/free", b"")])
            except ServiceUnavailable:
                worker.go_on()
            else:
                return stopped_at

    def check(self) -> set[str]:
        """With no store open; returns the keys that were orphans."""
        assert_chain(self.catalog, self.store)
        assert_each_committed_once(self.catalog)
        return assert_only_orphans_are_swept(self.catalog, self.store)

    def close(self) -> None:
        self.s3_proxy.close()
        if self.etcd_proxy is not None:
            self.etcd_proxy.close()
        self.impatient.close()
        self.catalog.close()
        self.store.close()


@pytest.fixture(params=["etcd", "sqlite"])
def setup(
    request: pytest.FixtureRequest, tmp_path: Path, s3: S3Server, etcd: EtcdServer
) -> Iterator[Setup]:
    yield from make_setup(request.param, tmp_path, s3, etcd)


@pytest.fixture
def etcd_backend(tmp_path: Path, s3: S3Server, etcd: EtcdServer) -> Iterator[Setup]:
    yield from make_setup("etcd", tmp_path, s3, etcd)


def make_setup(backend: Backend, tmp_path: Path, s3: S3Server, etcd: EtcdServer) -> Iterator[Setup]:
    setup = Setup(
        tmp_path,
        s3,
        MetadataSettings(
            backend=backend,
            path=tmp_path / "catalog.db" if backend == "sqlite" else None,
            endpoints=(etcd.endpoint,) if backend == "etcd" else (),
            prefix=f"/{s3.bucket().rpartition('/')[2]}",
            timeout_seconds=2,
            lease_seconds=LEASE_SECONDS,
            lease_margin_seconds=MARGIN_SECONDS,
            offsets_reserved=1000,
        ),
    )
    yield setup
    setup.close()


def assert_fenced(error: str) -> None:
    """The error says which topic it is, and what happened to it."""
    assert error.startswith("error TopicFenced")
    assert NAME in error
    assert "another process took the topic over" in error


def assert_holds(contents: Contents, acks: list[Ack]) -> None:
    for ack in acks:
        assert contents.messages[ack.offset] == ack.payload


def test_a_process_that_was_stopped_past_its_lease_acknowledges_nothing_more(
    setup: Setup,
) -> None:
    with setup.worker("first") as first:
        first.ask("append 20 uploaded")
        first.send("run")
        first.wait_for_acks(35)
        stopped_at = setup.stop(first)
        before = first.acks()
        with forebay.open(setup.settings("second")) as store:
            topic = store.topic(NAME)  # which waits for the lease's end
            second = {topic.append(b"second %d" % n, durability="synced"): n for n in range(20)}
            topic.upload()
            first.go_on()
            error = first.wait_until(lambda lines: next(iter(errors(lines)), None))
            assert_fenced(error)
            assert_only_what_was_under_way(first, before, stopped_at)
            # Whatever it tries now, it stays refused.
            before = first.acks()
            for command in ("append 1 synced", "append 1 uploaded", "upload"):
                assert_fenced(first.ask(command)[-1])
            assert first.acks() == before
            more = topic.append(b"second goes on", durability="uploaded")
            contents = read_all(topic)
        uploaded = [ack for ack in first.acks() if ack.durability == "uploaded"]
        lost = [ack for ack in first.acks() if ack.durability == "synced"]
        assert len(uploaded) == 20
        assert_holds(contents, uploaded)
        assert all(contents.messages[at] == b"second %d" % n for at, n in second.items())
        assert contents.messages[more] == b"second goes on"
        assert len(contents.messages) == 20 + 20 + 1
        assert contents.lost, "what was synced and not uploaded is reported as lost"
        for ack in lost:
            assert any(start <= ack.offset < end for start, end in contents.lost)
        setup.check()
        with forebay.open(setup.settings("third")) as store:
            assert read_all(store.topic(NAME)) == contents, "no local log is needed"
        assert_goes_on_behind(setup, first, contents)


def errors(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("error ")]


def assert_only_what_was_under_way(
    process: WorkerProcess, before: list[Ack], stopped_at: float
) -> None:
    """One append may have been confirmed when the process was stopped; none began later."""
    after = process.acks()[len(before) :]
    assert [ack for ack in after if ack.started > stopped_at] == []
    assert len({ack.started for ack in after}) <= 1


def assert_goes_on_behind(setup: Setup, first: WorkerProcess, contents: Contents) -> None:
    """The fenced process opens the topic again: its old log is set aside, and not used."""
    assert first.ask("open")[-1] == "done open"
    known = len(first.acks())
    assert first.ask("append 3 uploaded")[-1] == "done append 3 uploaded"
    offsets = [ack.offset for ack in first.acks()[known:]]
    assert offsets[0] > max(contents.messages)
    assert offsets == list(range(offsets[0], offsets[0] + 3))
    assert list((setup.folder / "first" / "wal").rglob("aside-*wal*.log"))
    first.ask("close")
    with forebay.open(setup.settings("fourth")) as store:
        after = read_all(store.topic(NAME))
    assert_holds(after, first.acks()[known:])
    assert len(after.messages) == len(contents.messages) + 3
    setup.check()


def test_a_process_that_was_stopped_and_not_replaced_goes_on(setup: Setup) -> None:
    with setup.worker("only") as only:
        only.ask("append 5 synced")
        setup.stop(only)
        wait_for_lease_to_end(setup)
        only.go_on()
        assert only.ask("append 5 synced")[-1] == "done append 5 synced"
        assert only.ask("append 1 uploaded")[-1] == "done append 1 uploaded"
        only.ask("close")
        record = setup.catalog.record(TOPIC)
        assert record is not None
        assert (record.epoch, record.lost, record.tail) == (1, (), 11)
        with forebay.open(setup.settings("only")) as store:
            assert_holds(read_all(store.topic(NAME)), only.acks())
    setup.check()


def wait_for_lease_to_end(setup: Setup) -> None:
    deadline = time.monotonic() + PATIENCE
    while setup.catalog.owner(TOPIC) is not None:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_during_an_outage_of_the_catalog_nothing_is_acknowledged_beyond_the_lease(
    etcd_backend: Setup,
) -> None:
    setup = etcd_backend
    assert setup.etcd_proxy is not None
    with setup.worker("only", proxied=True) as only:
        only.ask("append 5 uploaded")
        only.send("run")
        only.wait_for_acks(20)
        with setup.etcd_proxy.faults(Faults(black_hole=True)):
            # From this moment on the process is not told that its lease was prolonged.
            outage_at = time.monotonic()
            error = only.wait_until(lambda lines: next(iter(errors(lines)), None))
            wait_for_lease_to_end(setup)
        assert error.startswith("error TopicFenced")
        assert NAME in error
        last = max(ack.started for ack in only.acks())
        assert last <= outage_at + LEASE_SECONDS - MARGIN_SECONDS
        assert only.ask("open")[-1] == "done open"
        assert only.ask("append 5 synced")[-1] == "done append 5 synced"
        assert only.ask("upload")[-1] == "done upload"
        only.ask("close")
        record = setup.catalog.record(TOPIC)
        assert record is not None
        assert record.lost == ()
        with forebay.open(setup.settings("only")) as store:
            assert_holds(read_all(store.topic(NAME)), only.acks())
    setup.check()


def test_after_an_outage_in_which_nothing_was_appended_the_same_owner_goes_on(
    etcd_backend: Setup,
) -> None:
    setup = etcd_backend
    assert setup.etcd_proxy is not None
    with setup.worker("only", proxied=True) as only:
        only.ask("append 5 synced")
        with setup.etcd_proxy.faults(Faults(refuse=True, black_hole=True)):
            wait_for_lease_to_end(setup)
        assert only.ask("append 5 synced")[-1] == "done append 5 synced"
        record = setup.catalog.record(TOPIC)
        assert record is not None
        assert record.epoch == 1, "nobody else had it meanwhile"
        assert setup.catalog.owner(TOPIC) is not None
        assert only.ask("upload")[-1] == "done upload"
        only.ask("close")
        with forebay.open(setup.settings("only")) as store:
            assert_holds(read_all(store.topic(NAME)), only.acks())
    setup.check()


NOT_THERE: Final = Faults(http_error_rate=1)
THERE: Final = Faults(timeout_after_success_rate=1, hang_seconds=30)


@pytest.mark.parametrize(
    ("setup", "held", "more"),
    [
        pytest.param("etcd", NOT_THERE, 0, id="etcd, object not there, same range"),
        pytest.param("etcd", THERE, 4, id="etcd, object there, longer range"),
        pytest.param("sqlite", THERE, 0, id="sqlite, object there, same range"),
        pytest.param("sqlite", NOT_THERE, 4, id="sqlite, object not there, longer range"),
    ],
    indirect=["setup"],
)
def test_an_uploader_that_was_stopped_in_a_transfer_cannot_commit_it(
    setup: Setup, held: Faults, more: int
) -> None:
    """The new owner has a copy of the same log, so that it uploads the same messages."""
    with setup.worker("first", proxied=True) as first:
        first.ask("append 30 synced")
        marked = puts(setup)
        with setup.s3_proxy.faults(held):
            first.send("upload")
            wait_for_put(setup, marked)
            setup.stop(first)
            shutil.copytree(setup.folder / "first", setup.folder / "second")
        with forebay.open(setup.settings("second")) as store:
            topic = store.topic(NAME)
            for number in range(more):
                topic.append(b"second %d" % number, durability="synced")
            committed = topic.upload()
            contents = read_all(topic)
            assert len(contents.messages) == 30 + more
            assert_holds(contents, first.acks())
            first.go_on()
            assert_fenced(first.wait_until(end_of_upload))
            topic.append(b"second goes on", durability="uploaded")
            assert list(assert_chain(setup.catalog, setup.store))[: len(committed)] == committed
            assert len(read_all(topic).messages) == 30 + more + 1
    orphans = setup.check()
    assert bool(orphans) == bool(more), "an object of a range that nobody committed is an orphan"
    with forebay.open(setup.settings("third")) as store:
        assert len(read_all(store.topic(NAME)).messages) == 30 + more + 1


def end_of_upload(lines: list[str]) -> str | None:
    return next((line for line in lines if line == "done upload" or errors([line])), None)


def puts(setup: Setup) -> int:
    return setup.s3_proxy.requests_by_method().get("PUT", 0)


def wait_for_put(setup: Setup, before: int) -> None:
    """Waits for a PUT after those that created begin markers."""
    deadline = time.monotonic() + PATIENCE
    while puts(setup) <= before:
        assert time.monotonic() < deadline
        time.sleep(0.005)
