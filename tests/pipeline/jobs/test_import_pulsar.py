"""`import_pulsar`: ledgers in a bucket become topics, in order, each message once."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

import forebay
from forebay.errors import ServiceUnavailable, UsageError
from forebay.format.message import StreamMessage
from forebay.format.pulsar.topic import PulsarTopic
from forebay.pipeline.jobs.import_pulsar import (
    PulsarImportReport,
    PulsarImportRow,
    import_pulsar,
    target_of,
)
from forebay.pipeline.jobs.replay import target_owner
from forebay.pipeline.pulsar.options import bucket_at
from support import pulsar_entries as pulsar
from support.paths import TESTS
from support.pulsar_buckets import at, put_ledger

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from support.s3_server import S3Server

OWNER: Final = "forebay.pipeline.jobs.import_pulsar.target_owner"


def run(path: Path, **choices: Any) -> PulsarImportReport:
    """Imports the bucket of a test into its store."""
    given = {"apply": True, "runner": "threads", **choices}
    return import_pulsar(path / "data", bucket_at(str(path / "bucket"), {}), **given)


def read(path: Path, topic: str = "orders") -> list[StreamMessage]:
    with forebay.open(path / "data") as store:
        return list(store.topic(topic).read())


def payloads(path: Path, topic: str = "orders") -> list[bytes]:
    return [bytes(message.payload) for message in read(path, topic)]


def put(path: Path, ledgers: dict[int, Sequence[bytes]], **options: Any) -> None:
    with closing(at(path / "bucket")) as store:
        for ledger_id, entries in ledgers.items():
            put_ledger(store, ledger_id, entries, **options)


def entries_of(ledger_id: int, count: int = 3) -> list[bytes]:
    return [pulsar.entry(b"%d-%d" % (ledger_id, number)) for number in range(count)]


def values_of(*ledger_ids: int) -> list[bytes]:
    return [b"%d-%d" % (each, number) for each in ledger_ids for number in range(3)]


def test_a_plan_changes_nothing_and_counts_everything(tmp_path: Path) -> None:
    put(tmp_path, {5: entries_of(5), 9: [*entries_of(9), pulsar.marker()]})
    report = run(tmp_path, apply=False)
    [row] = report.rows
    assert (report.applied, report.ok) == (False, True)
    assert (row.topic, row.into) == ("persistent://public/default/orders", "/default/orders")
    assert (row.ledgers, row.known, row.messages, row.marker) == (2, 0, 6, 1)
    assert not (tmp_path / "data").exists()


def test_messages_keep_their_order_and_what_pulsar_says_of_them(tmp_path: Path) -> None:
    batch = [
        pulsar.single(b"b0", key="k", properties=[("a", "1"), ("forebay.sink", "x")]),
        pulsar.single(b"b1", null_value=True),
    ]
    put(
        tmp_path,
        {
            7: [
                pulsar.entry(b"first", key="/w==", partition_key_b64=True, event_time=7),
                pulsar.batch(batch, "LZ4"),
                pulsar.entry(b"last", ordering_key=b"o", schema_version=bytes(8)),
            ]
        },
    )
    assert run(tmp_path).messages == 4
    first, second, third, last = read(tmp_path)
    assert first.attributes["pulsar.key"] == "/w=="
    assert (first.routing_key, first.attributes["pulsar.event-time"]) == (None, "7")
    assert first.attributes["pulsar.publish-time"] == str(pulsar.TIME)
    assert [each.attributes["pulsar.message-id"] for each in (first, second, third, last)] == [
        "7:0:-1",
        "7:1:0",
        "7:1:1",
        "7:2:-1",
    ]
    assert (second.payload, second.routing_key, second.attributes["a"]) == (b"b0", "k", "1")
    assert second.attributes["pulsar.forebay.sink"] == "x"
    assert (third.payload, third.attributes["pulsar.null-value"]) == (b"", "true")
    assert last.attributes["pulsar.ordering-key"] == "bw=="
    assert last.attributes["pulsar.schema-version"] == "0"


def test_a_second_run_appends_only_what_was_offloaded_since(tmp_path: Path) -> None:
    put(tmp_path, {5: entries_of(5), 9: entries_of(9)})
    assert run(tmp_path).messages == 6
    assert run(tmp_path).messages == 0
    put(tmp_path, {12: entries_of(12)})
    report = run(tmp_path)
    assert (report.rows[0].known, report.messages) == (2, 3)
    assert payloads(tmp_path) == values_of(5, 9, 12)


def test_a_ledger_that_appears_late_is_named_and_not_imported(tmp_path: Path) -> None:
    put(tmp_path, {5: entries_of(5), 9: entries_of(9)})
    assert run(tmp_path).ok
    put(tmp_path, {7: entries_of(7), 12: entries_of(12)})
    report = run(tmp_path)
    assert (report.ok, report.rows[0].late) == (False, [7])
    assert payloads(tmp_path) == values_of(5, 9, 12)
    assert run(tmp_path, topics=["orders"], into="whole").ok
    assert payloads(tmp_path, "whole") == values_of(5, 7, 9, 12)


def test_a_message_in_chunks_is_imported_when_it_is_whole(tmp_path: Path) -> None:
    data = pulsar.chunks(b"abcdef", 2, "p-1")
    put(tmp_path, {1: [*entries_of(1), data[0]]})
    assert run(tmp_path).rows[0].incomplete == 1
    put(tmp_path, {2: [data[1], *entries_of(2), data[2]], 3: entries_of(3)})
    assert run(tmp_path).rows[0].incomplete == 0
    assert payloads(tmp_path) == [*values_of(1, 2), b"abcdef", *values_of(3)]


@pytest.mark.parametrize("kind", ["transactional", "encrypted"])
def test_what_could_matter_needs_a_decision(tmp_path: Path, kind: str) -> None:
    special = (
        pulsar.entry(b"?", txn_least_bits=1) if kind == "transactional" else pulsar.encrypted(b"?")
    )
    put(tmp_path, {1: [*entries_of(1), special, pulsar.marker()]})
    for apply in (False, True):
        [row] = run(tmp_path, apply=apply).rows
        assert f"1 messages are {kind}" in str(row.error)
        assert f"--keep {kind}, or leave them out with --leave-out {kind}" in str(row.error)
    [row] = run(tmp_path, leave_out=[kind]).rows
    assert (row.error, row.messages, row.marker, getattr(row, kind)) == (None, 3, 1, 1)
    assert run(tmp_path, keep=[kind], topics=["orders"], into="all").ok
    last = read(tmp_path, "all")[-1]
    assert (last.payload, last.attributes["pulsar.kind"]) == (b"?", kind)


def test_damage_stops_a_topic_and_no_other_one(tmp_path: Path) -> None:
    put(tmp_path, {1: entries_of(1)})
    put(tmp_path, {2: entries_of(2)}, managed_ledger="public/default/persistent/returns")
    [path] = (tmp_path / "bucket").glob("*-ledger-1")
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 0xFF
    path.write_bytes(bytes(raw))
    orders, returns = run(tmp_path).rows
    assert "entry 2 at position" in str(orders.error)
    assert "--leave-out damaged" in str(orders.error)
    assert returns.error is None
    assert payloads(tmp_path, "returns") == values_of(2)
    [orders] = run(tmp_path, topics=["orders"], leave_out=["damaged"]).rows
    assert (orders.error, orders.damaged, orders.messages) == (None, 1, 2)


def test_messages_that_are_too_large_need_a_decision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.pipeline.jobs.import_pulsar.MESSAGE_BYTES_MAX", 20_000)
    many = tuple((f"n{number}", "v") for number in range(1020))
    large = [pulsar.entry(b"x" * 12_000), pulsar.entry(b"y", properties=many)]
    put(tmp_path, {1: [*large, *entries_of(1)]}, block_bytes=64 * 1024)
    [row] = run(tmp_path).rows
    assert "2 messages are large, and an import does not decide" in str(row.error)
    assert "leave them out with --leave-out large" in str(row.error)
    [row] = run(tmp_path, leave_out=["large"]).rows
    assert (row.error, row.large, row.messages) == (None, 2, 3)


def test_topics_get_names_of_the_store(tmp_path: Path) -> None:
    assert str(target_of(PulsarTopic("public/eu", "orders"))) == "/eu/orders"
    assert str(target_of(PulsarTopic("acme/eu", "x-partition-3"))) == "/acme_eu/x-part-3"
    put(tmp_path, {1: entries_of(1)}, managed_ledger="public/default/persistent/a.b")
    put(tmp_path, {2: entries_of(2)}, managed_ledger="a_b/c/persistent/x")
    put(tmp_path, {3: entries_of(3)}, managed_ledger="a/b_c/persistent/x")
    rows = run(tmp_path).rows
    assert ["--into" in str(row.error) for row in rows] == [False, False, True]
    assert sum("would become /a_b_c/x too" in str(row.error) for row in rows) == 1
    assert run(tmp_path, topics=["a.b"], into="ab").ok
    assert payloads(tmp_path, "ab") == values_of(1)


def test_calls_that_cannot_be_right_are_refused(tmp_path: Path) -> None:
    put(tmp_path, {1: entries_of(1)})
    put(tmp_path, {2: entries_of(2)}, managed_ledger="public/default/persistent/returns")
    with pytest.raises(UsageError, match="one target was named for 2 topics"):
        run(tmp_path, into="x")
    with pytest.raises(UsageError, match="no ledger of the topic order; the nearest is orders"):
        run(tmp_path, topics=["order"])
    with pytest.raises(UsageError, match="cannot be 'marker'"):
        run(tmp_path, keep=["marker"])
    with pytest.raises(UsageError, match="both kept and left out"):
        run(tmp_path, keep=["encrypted"], leave_out=["encrypted"])
    own = bucket_at(str(tmp_path / "bucket"), {})
    settings = forebay.settings.StoreSettings(tmp_path / "data", cloud=own)
    with pytest.raises(UsageError, match="is the bucket and the target"):
        import_pulsar(settings, own, runner="threads")


# ---- interruptions ----


def test_a_batch_whose_tasks_fail_is_imported_by_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, {each: entries_of(each) for each in range(6)})
    monkeypatch.setattr("forebay.pipeline.jobs.import_pulsar._BATCH_BYTES_MAX", 1)
    from forebay.pipeline.jobs import import_pulsar as module

    real, calls = module._read_task, 0

    def failing(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise ServiceUnavailable("the store does not answer")
        return real(*arguments)

    monkeypatch.setattr(module, "_read_task", failing)
    monkeypatch.setattr("forebay.pipeline.execute._THREAD_ATTEMPTS", 1)
    [row] = run(tmp_path).rows
    assert (row.messages, row.error) == (9, "the store does not answer")
    assert payloads(tmp_path) == values_of(0, 1, 2)
    [row] = run(tmp_path).rows
    assert (row.known, row.messages, row.repeated) == (3, 9, 0)
    assert payloads(tmp_path) == values_of(*range(6))


@pytest.mark.parametrize("seen", [(6, 7), (5, 6, 7, 9)])
def test_of_two_imports_at_once_only_one_appends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: tuple[int, ...]
) -> None:
    """The other one runs from its beginning to its end between reading and appending.

    It lists the bucket at another moment, so that it sees fewer ledgers, or more.
    """
    put(tmp_path, {each: entries_of(each) for each in (6, 7, 9)})
    rows: list[PulsarImportRow] = []

    @contextmanager
    def overtaken(*arguments: Any) -> Any:
        monkeypatch.setattr(OWNER, target_owner)
        (tmp_path / "bucket").rename(tmp_path / "aside")
        put(tmp_path, {each: entries_of(each) for each in seen})
        rows.extend(run(tmp_path).rows)
        (tmp_path / "bucket").rename(tmp_path / "other")
        (tmp_path / "aside").rename(tmp_path / "bucket")
        with target_owner(*arguments) as commit:
            yield commit

    monkeypatch.setattr(OWNER, overtaken)
    [refused] = run(tmp_path).rows
    assert (rows[0].error, refused.messages) == (None, 0)
    assert payloads(tmp_path) == values_of(*seen)
    assert refused.error is not None
    expected = values_of(*sorted({*seen, 9}))
    assert (run(tmp_path).rows[0].error, payloads(tmp_path)) == (None, expected)


def test_a_batch_that_another_import_overtook_leaves_no_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, {7: entries_of(7)})

    @contextmanager
    def overtaken(*arguments: Any) -> Any:
        monkeypatch.setattr(OWNER, target_owner)
        with target_owner(*arguments) as commit:

            def late(batch: Any, parts: Any) -> Any:
                commit(replace(batch, number=7, after=None), parts)
                return commit(batch, parts)

            yield late

    monkeypatch.setattr(OWNER, overtaken)
    [row] = run(tmp_path).rows
    assert "planned before another run" in str(row.error)
    put(tmp_path, {5: entries_of(5)})
    assert run(tmp_path).rows[0].late == [5]


def test_a_topic_that_was_deleted_is_imported_again(tmp_path: Path) -> None:
    put(tmp_path, {5: entries_of(5)})
    assert run(tmp_path).messages == 3
    with forebay.open(tmp_path / "data") as store:
        store.delete("orders")
    [row] = run(tmp_path).rows
    assert (row.error, row.messages) == (None, 3)
    assert payloads(tmp_path) == values_of(5)


def a_large_topic(path: Path) -> list[bytes]:
    """Some 30 MB in ledgers of every kind; the values in order."""
    source, found = random.Random(2), []
    for ledger_id in range(1, 31):
        entries = []
        for number in range(200):
            values = [source.randbytes(1000) + b"%d-%d" % (ledger_id, number) for _ in range(5)]
            found += values
            if number % 2:
                entries.append(pulsar.batch([pulsar.single(each) for each in values], "ZSTD"))
            else:
                entries += [pulsar.entry(each) for each in values]
        put(path, {ledger_id: entries}, block_bytes=256 * 1024)
    return found


@pytest.mark.parametrize("moment", range(3))
def test_an_import_that_is_killed_goes_on_without_a_loss_and_without_a_copy(
    tmp_path: Path, moment: int
) -> None:
    found = a_large_topic(tmp_path)
    program = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[2])\n"
        "import forebay.pipeline.jobs.import_pulsar as m\n"
        "from forebay.pipeline.pulsar.options import bucket_at\n"
        "m._BATCH_BYTES_MAX = 5_000_000\n"
        "path = Path(sys.argv[1])\n"
        "m.import_pulsar(path / 'data', bucket_at(str(path / 'bucket'), {}), apply=True,"
        " runner='threads')\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path), str(TESTS)]
    process = subprocess.Popen(command, start_new_session=True)
    log = tmp_path / "data" / "wal" / "default" / "orders" / "wal.log"
    wanted = (1_000_000, 8_000_000, 20_000_000)[moment]
    deadline = time.monotonic() + 200
    while not (log.exists() and log.stat().st_size > wanted):
        assert process.poll() is None, "it ended before it was killed"
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    [row] = run(tmp_path).rows
    assert row.error is None
    assert row.messages < len(found)
    assert payloads(tmp_path) == found


def test_an_import_runs_on_spark_from_a_real_s3_server(
    spark: SparkSession, s3: S3Server, tmp_path: Path
) -> None:
    from forebay.objects.store import connect

    cloud = s3.settings(s3.bucket())
    with closing(connect(cloud)) as store:
        for ledger_id in (3, 4, 8):
            put_ledger(store, ledger_id, entries_of(ledger_id, 300), block_bytes=4096)
    report = import_pulsar(tmp_path / "data", cloud, apply=True, spark=spark)
    assert (report.ok, report.messages) == (True, 900)
    expected = [b"%d-%d" % (each, number) for each in (3, 4, 8) for number in range(300)]
    assert payloads(tmp_path) == expected
    found = report.dataframe(spark).collect()[0]
    assert (found["messages"], found["late"], found["error"]) == (900, 0, None)
