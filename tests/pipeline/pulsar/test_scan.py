"""Scans of buckets of Pulsar, without Spark: what is planned, and what the tasks read."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forebay.errors import CorruptLog, MissingData, UsageError
from forebay.format.frame import encode_frame, scan
from forebay.format.message import MessageId, StreamMessage, encode_message
from forebay.format.pulsar.frames import FramePacker
from forebay.format.pulsar.index import LedgerIndex, encode_index
from forebay.format.pulsar.ledger_metadata import MANAGED_LEDGER, LedgerMetadata
from forebay.format.pulsar.messages import (
    ChunkAssembler,
    ChunkPlace,
    Kind,
    Message,
    decode_messages,
    incomplete,
)
from forebay.objects.backend import ObjectMeta
from forebay.objects.local import LocalBackend
from forebay.objects.store import CloudStore
from forebay.pipeline.pulsar.bucket import Bucket
from forebay.pipeline.pulsar.options import PulsarOptions, pulsar_options
from forebay.pipeline.pulsar.plan import splits
from forebay.pipeline.pulsar.scan import plan_scan, read_split
from support import pulsar_entries as pulsar
from support.ledgers import REAL_DATA, REAL_INDEX
from support.pulsar_buckets import ORDERS, TOPIC, at, put_ledger

SPLITS = (1, 3000, 10**9)


def options_of(path: Path, **given_options: Any) -> PulsarOptions:
    return pulsar_options({"path": str(path), **{k: str(v) for k, v in given_options.items()}})


def rows_of(options: PulsarOptions) -> list[dict[str, Any]]:
    batches = [batch for split in plan_scan(options) for batch in read_split(options, split)]
    if not batches:
        return []
    table = pa.Table.from_batches(batches)
    table.validate(full=True)
    found: list[dict[str, Any]] = table.to_pylist()
    return found


def in_order(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    keys = ("__topic", "__ledgerId", "__entryId", "__batchIndex")
    return sorted(rows, key=lambda row: [row[key] for key in keys])


def expected(ledgers: dict[int, list[bytes]]) -> list[tuple[int, int, int, str, bytes | None]]:
    """What one reader of the whole topic finds: ledger, entry, batch index, kind and value."""
    assembler = ChunkAssembler()
    found: list[tuple[int, Message]] = []
    for ledger_id, entries in sorted(ledgers.items()):
        for entry_id, data in enumerate(entries):
            decoded = decode_messages(entry_id, data)
            if isinstance(decoded, list):
                found += [(ledger_id, each) for each in decoded]
                continue
            whole = assembler.add(ChunkPlace(ledger_id, entry_id), decoded)
            if whole is not None:
                found.append((ledger_id, whole.message))
    for place, chunk in assembler.finish():
        found.append((place.ledger_id, incomplete(place.entry_id, chunk)))
    rows = [
        (
            ledger_id,
            each.entry_id,
            each.batch_index,
            each.kind.value,
            None if each.value is None else bytes(each.value),
        )
        for ledger_id, each in found
    ]
    return sorted(rows, key=lambda row: row[:3])


def found_in(options: PulsarOptions) -> list[tuple[int, int, int, str, bytes | None]]:
    names = ("__ledgerId", "__entryId", "__batchIndex", "__kind", "value")
    rows = [tuple(row[name] for name in names) for row in rows_of(options)]
    return sorted(rows, key=lambda row: row[:3])


def any_entry(source: random.Random) -> list[bytes]:
    """An entry of any kind, or the chunks of a message."""
    value = source.randbytes(source.choice([0, 10, 300]))
    match source.randrange(9):
        case 0:
            singles = [pulsar.single(value, key="k"), pulsar.single(b"b", null_value=True)]
            return [pulsar.batch(singles, source.choice(["NONE", "LZ4", "ZLIB", "ZSTD", "SNAPPY"]))]
        case 1:
            return [pulsar.entry(value, compression="ZSTD", key="k")]
        case 2:
            return [source.choice([pulsar.marker(), pulsar.encrypted(value)])]
        case 3:
            return [pulsar.entry(value, txn_least_bits=1, txn_most_bits=2)]
        case 4:
            return pulsar.chunks(source.randbytes(400), 90, f"p-{source.random()}", "LZ4")
        case _:
            return [pulsar.entry(value, properties=(("n", str(source.random())),))]


def a_topic(source: random.Random, ledgers: int, messages: int) -> dict[int, list[bytes]]:
    """Ledgers whose chunks are interleaved with other entries, and lost here and there."""
    waiting = [any_entry(source) for _ in range(messages)]
    entries: list[bytes] = []
    open_now: list[list[bytes]] = []
    while waiting or open_now:
        if waiting and (len(open_now) < 4 or source.random() < 0.3):
            open_now.append(waiting.pop())
        chosen = source.choice(open_now)
        entry = chosen.pop(0)
        if source.random() > 0.02:
            entries.append(entry)
        open_now = [each for each in open_now if each]
    cuts = sorted(source.randrange(1, len(entries)) for _ in range(ledgers - 1))
    bounds = [0, *cuts, len(entries)]
    parts = [entries[first:last] for first, last in pairwise(bounds)]
    return {3 + 4 * number: part for number, part in enumerate(parts) if part}


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**32))
def test_however_a_topic_is_cut_its_messages_are_those_of_one_reader(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    source = random.Random(seed)
    path = tmp_path_factory.mktemp("bucket")
    ledgers = a_topic(source, source.randrange(1, 6), 40)
    with closing(at(path)) as store:
        for ledger_id, entries in ledgers.items():
            put_ledger(store, ledger_id, entries, block_bytes=source.choice([1024, 2048, 65536]))
    for split_bytes in SPLITS:
        options = replace(options_of(path), split_bytes=split_bytes)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("forebay.pipeline.pulsar.scan._GROUP_ROWS_MIN", seed % 4)
            assert found_in(options) == expected(ledgers)


def test_the_rows_of_a_task_are_in_the_order_of_the_topic(tmp_path: Path) -> None:
    first, *others = pulsar.chunks(b"x" * 300, 100, "p-1")
    entries = [first, *(pulsar.entry(b"y" * 800) for _ in range(3)), *others]
    entries += [pulsar.entry(b"z"), pulsar.batch([pulsar.single(b"b")]), pulsar.entry(b"z")]
    with closing(at(tmp_path)) as store:
        put_ledger(store, 7, entries, block_bytes=1024)
    planned = plan_scan(replace(options_of(tmp_path), split_bytes=1))
    rows = [
        row
        for split in planned
        for batch in read_split(options_of(tmp_path), split)
        for row in batch.to_pylist()
    ]
    assert len(planned) > 3
    assert [row["__entryId"] for row in rows] == [1, 2, 3, 5, 6, 7, 8]


def test_a_real_ledger_of_a_broker_is_read(tmp_path: Path) -> None:
    uid = "0d5b7ca9-0000-4000-8000-000000000001"
    with closing(at(tmp_path)) as store:
        store.put_object(f"offloaded/{uid}-ledger-1", REAL_DATA)
        store.put_object(f"offloaded/{uid}-ledger-1-index", REAL_INDEX)
    [row] = rows_of(options_of(tmp_path, columns="value,__topic,__entryId,__batchIndex,__kind"))
    assert row == {
        "value": b"hello-reader-1",
        "__topic": "persistent://public/default/read-test",
        "__entryId": 0,
        "__batchIndex": 0,
        "__kind": "message",
    }


def values(path: Path, **given_options: Any) -> list[bytes]:
    rows = rows_of(options_of(path, **given_options))
    keys = ("__topic", "__ledgerId", "__entryId")
    return [row["value"] for row in sorted(rows, key=lambda row: [row[key] for key in keys])]


def fill(path: Path) -> None:
    """Three topics, one of them with two partitions, at different depths and times."""
    names = ["orders", "clicks-partition-0", "clicks-partition-1"]
    with closing(at(path)) as store:
        for number, name in enumerate(names):
            for ledger in range(2):
                time = 10_000_000_000 * (ledger + 1)
                entry = pulsar.entry(f"{name} {ledger}".encode(), publish_time=time + 5_000_000)
                put_ledger(
                    store,
                    10 * ledger + number,
                    [entry],
                    managed_ledger=f"public/default/persistent/{name}",
                    created_ms=time,
                    folder="a/b/" if ledger else "",
                )
        entry = pulsar.entry(b"elsewhere")
        put_ledger(store, 99, [entry], managed_ledger="acme/eu/persistent/a%2Fb")


def test_topics_are_chosen_by_name_and_by_pattern(tmp_path: Path) -> None:
    fill(tmp_path)
    assert len(values(tmp_path)) == 7
    assert values(tmp_path, subscribe="orders") == [b"orders 0", b"orders 1"]
    clicks = [b"clicks-partition-0 0", b"clicks-partition-0 1"]
    assert values(tmp_path, subscribe="public/default/clicks-partition-0") == clicks
    assert len(values(tmp_path, subscribe="persistent://public/default/clicks")) == 4
    assert values(tmp_path, subscribePattern=".*acme/.*") == [b"elsewhere"]
    assert values(tmp_path, subscribePattern="nothing") == []
    with pytest.raises(UsageError, match="no ledger of the topic order; the nearest is orders"):
        values(tmp_path, subscribe="order")
    [row] = rows_of(options_of(tmp_path, subscribe="acme/eu/a/b", columns="__topic,__partition"))
    assert row == {"__topic": "persistent://acme/eu/a/b", "__partition": -1}
    [row, _] = rows_of(options_of(tmp_path, subscribe="clicks-partition-1", columns="__partition"))
    assert row == {"__partition": 1}


def test_times_skip_ledgers_and_choose_messages(tmp_path: Path) -> None:
    fill(tmp_path)
    given_options: dict[str, Any] = {"subscribe": "orders", "startingTimestamp": 20_004_000_000}
    assert values(tmp_path, **given_options) == [b"orders 1"]
    skipped = [
        part.ledger.ledger_id
        for split in plan_scan(options_of(tmp_path, **given_options))
        for part in split.parts
    ]
    assert skipped == [10]  # by the time at which they were created
    assert values(tmp_path, subscribe="orders", endingTimestamp=20_005_000_000) == [b"orders 0"]
    both = values(tmp_path, subscribe="orders", endingTimestamp=20_005_000_001)
    assert both == [b"orders 0", b"orders 1"]


def test_a_message_that_was_stored_days_after_it_was_published_is_found(tmp_path: Path) -> None:
    """One that was replicated keeps its time, however long the other cluster was not reached."""
    day = 24 * 3_600_000
    late = pulsar.entry(b"late", replicated_from="west", publish_time=pulsar.TIME)
    with closing(at(tmp_path)) as store:
        put_ledger(store, 7, [late], created_ms=pulsar.TIME + 5 * day)
        put_ledger(store, 8, [pulsar.entry(b"x")], created_ms=pulsar.TIME + 30 * day)
    end = {"endingTimestamp": pulsar.TIME + day}
    assert values(tmp_path, **end)[:1] == [b"late"]
    [split] = plan_scan(options_of(tmp_path, **end))
    assert [part.ledger.ledger_id for part in split.parts] == [7]


def test_an_upload_that_failed_is_left_out_and_two_are_read_once(tmp_path: Path) -> None:
    entries = [pulsar.entry(bytes([number])) for number in range(5)]
    with closing(at(tmp_path)) as store:
        key = put_ledger(store, 7, entries)
        put_ledger(store, 7, entries)
        other = put_ledger(store, 8, entries)
        store.delete_object(f"{other}-index")
        store.put_object("unrelated/data", b"?")
        assert values(tmp_path) == [bytes([number]) for number in range(5)]
        store.delete_object(key)
        assert len(values(tmp_path)) == 5


def test_two_clusters_in_one_prefix_are_told_apart(tmp_path: Path) -> None:
    with closing(at(tmp_path)) as store:
        put_ledger(store, 7, [pulsar.entry(b"a")])
        put_ledger(store, 7, [pulsar.entry(b"bb")])
    with pytest.raises(UsageError, match="name a prefix that holds those of one cluster"):
        values(tmp_path)


def test_uploads_of_one_ledger_with_blocks_of_two_sizes_are_read_once(tmp_path: Path) -> None:
    entries = [pulsar.entry(b"%d" % number) for number in range(200)]
    with closing(at(tmp_path)) as store:
        for block_bytes in (1024, 4096):
            put_ledger(store, 7, entries, block_bytes=block_bytes)
    assert values(tmp_path) == [b"%d" % number for number in range(200)]


def test_a_ledger_of_another_topic_with_the_same_number_hides_no_damage(tmp_path: Path) -> None:
    entry = [pulsar.entry(b"a")]
    with closing(at(tmp_path)) as store:
        put_ledger(store, 7, entry, folder="one/")
        other = "public/default/persistent/invoices"
        key = put_ledger(store, 7, entry, managed_ledger=other, folder="two/")
        index = bytes(store.get_object(f"{key}-index", 10_000))
        store.put_object(f"{key}-index", index[:-1])
        with pytest.raises(CorruptLog, match=f"{key}-index: .*cut off"):
            values(tmp_path)
        store.put_object(f"{key}-index", index)
        store.delete_object(key)
        with pytest.raises(CorruptLog, match="there is no data object for it"):
            values(tmp_path)
        assert values(tmp_path, failOnDataLoss="false") == [b"a"]


def damage(path: Path, key: str, position: int) -> None:
    file = path / key
    raw = bytearray(file.read_bytes())
    raw[position] ^= 0xFF
    file.write_bytes(bytes(raw))


def test_damage_says_where_it_is_and_can_be_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    entries = [pulsar.entry(b"%d" % number) for number in range(10)]
    with closing(at(tmp_path)) as store:
        key = put_ledger(store, 7, entries)
    damage(tmp_path, key, 128 + 5 * (12 + len(entries[0])) - 1)
    with pytest.raises(CorruptLog, match=rf"{key} of {TOPIC}: entry 4 at position .*checksum"):
        values(tmp_path)
    left = [b"%d" % number for number in range(10) if number != 4]
    with caplog.at_level(logging.WARNING):
        assert values(tmp_path, failOnDataLoss="false") == left
    assert "damaged data left out" in caplog.text
    damage(tmp_path, key, 128)  # the length of the first entry
    with pytest.raises(CorruptLog, match="at position 128"):
        values(tmp_path)
    assert values(tmp_path, failOnDataLoss="false") == []


def test_a_ledger_that_cannot_be_read_is_an_error_that_names_it(tmp_path: Path) -> None:
    with closing(at(tmp_path)) as store:
        key = put_ledger(store, 7, [pulsar.entry(b"a")])
        put_ledger(store, 8, [pulsar.entry(b"b")])
        index = bytes(store.get_object(f"{key}-index", 10_000))
        for raw, said in ((index[:-1], "cut off"), (b"?" * 40, "not an index object")):
            store.put_object(f"{key}-index", raw)
            with pytest.raises(CorruptLog, match=f"{key}-index: .*{said}"):
                values(tmp_path)
            assert values(tmp_path, failOnDataLoss="false") == [b"b"]
        meta = {"s3managedledgeroffloaderformatversion": "2"}
        store.put_object(f"{key}-index", index, meta)
        with pytest.raises(CorruptLog, match="format version 2"):
            values(tmp_path)
        store.put_object(f"{key}-index", index, {"s3managedledgeroffloaderformatversion": "1"})
        assert values(tmp_path) == [b"a", b"b"]


def test_a_ledger_that_comes_or_goes_during_the_listing_is_no_damage(tmp_path: Path) -> None:
    with closing(at(tmp_path)) as store:
        come, gone = (put_ledger(store, each, [pulsar.entry(b"a")]) for each in (7, 8))
        listed = [meta for meta in store.list("") if meta.key not in (come, gone)]
        for key in (gone, f"{gone}-index"):
            store.delete_object(key)
        assert len(listed) == 2

        class Stale(CloudStore):
            """Lists what was there before."""

            def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectMeta]:
                yield from listed

        stale = Stale(LocalBackend(tmp_path))
        assert [ledger.ledger_id for ledger in Bucket(stale).look()] == [7]
        store.delete_object(come)
        with pytest.raises(CorruptLog, match="there is no data object for it"):
            Bucket(store).look()


def test_a_ledger_that_is_deleted_after_the_plan_is_missing(tmp_path: Path) -> None:
    with closing(at(tmp_path)) as store:
        key = put_ledger(store, 7, [pulsar.entry(b"a")])
        options = options_of(tmp_path)
        [split] = plan_scan(options)
        store.delete_object(key)
    with pytest.raises(MissingData, match="was deleted after the query was planned"):
        list(read_split(options, split))


def test_a_ledger_without_a_name_says_its_topic_in_the_metadata_of_the_object(
    tmp_path: Path,
) -> None:
    with closing(at(tmp_path)) as store:
        key = put_ledger(store, 7, [pulsar.entry(b"a")], managed_ledger=None)
        columns = {"columns": "__topic"}
        [row] = rows_of(options_of(tmp_path, **columns))
        assert row == {"__topic": "persistent:///unknown"}
        raw = bytes(store.get_object(f"{key}-index", 10_000))
        store.put_object(f"{key}-index", raw, {"managedledgername": "t/n/persistent/x"})
        [row] = rows_of(options_of(tmp_path, **columns))
        assert row == {"__topic": "persistent://t/n/x"}

        class Gcs(CloudStore):
            """The names of metadata have capital letters there."""

            def head(self, key: str) -> ObjectMeta:
                meta = super().head(key)
                capitals = {"managedledgername": "ManagedLedgerName"}
                named = {capitals.get(each, each): text for each, text in meta.metadata.items()}
                return replace(meta, metadata=named)

        [ledger] = Bucket(Gcs(LocalBackend(tmp_path))).look()
        assert str(ledger.topic) == "persistent://t/n/x"


def test_blocks_are_tasks_and_small_ones_are_packed(tmp_path: Path) -> None:
    entries = [pulsar.entry(b"x" * 1000) for _ in range(100)]
    with closing(at(tmp_path)) as store:
        for ledger_id in range(3):
            put_ledger(store, ledger_id, entries, block_bytes=64 * 1024)
    options = options_of(tmp_path, splitBytes="64KiB")
    planned = plan_scan(options)
    assert len(planned) == 6
    assert len(plan_scan(options_of(tmp_path))) == 1
    rows = [batch.num_rows for split in planned for batch in read_split(options, split)]
    assert sum(rows) == 300


def large(entries: Sequence[bytes]) -> int:
    return sum(len(entry) for entry in entries)


def test_a_task_knows_the_ledgers_around_its_own_and_no_others(tmp_path: Path) -> None:
    names = {1: "a", 2: "b"}
    with closing(at(tmp_path)) as store:
        for ledger_id in range(40):
            for number, name in names.items():
                managed = f"public/default/persistent/{name}"
                entry = [pulsar.entry(b"%d" % number)]
                put_ledger(store, 100 * number + ledger_id, entry, managed_ledger=managed)
        bucket = Bucket(store)
        there = bucket.look()
        wanted = [each for each in there if each.ledger_id in (102, 120, 239)]
        [split] = splits(bucket, wanted, there, 1 << 20)
    around = [each.ledger.ledger_id for each in split.around]
    assert around == [*range(100, 129), *range(231, 240)]
    assert [each.ledger.ledger_id for each in split.around if each.read] == [102, 120, 239]


def test_a_message_in_chunks_is_whole_across_ledgers_that_times_leave_out(tmp_path: Path) -> None:
    data = pulsar.chunks(b"abcdef", 2, "p-1", publish_time=50_000_000_000)
    assert large(data) > 6
    with closing(at(tmp_path)) as store:
        for number, each in enumerate(data):
            put_ledger(store, number, [each], created_ms=10_000_000_000 * (number + 1))
    rows = rows_of(options_of(tmp_path, columns="value,__ledgerId,__kind"))
    assert rows == [{"value": b"abcdef", "__ledgerId": 2, "__kind": Kind.MESSAGE.value}]
    found = values(tmp_path, startingTimestamp=30_000_000_000)
    assert found == [b"abcdef"]


@pytest.mark.parametrize("seed", range(8))
def test_no_chunk_is_lost_where_the_search_for_the_others_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Tasks see different parts of a message, and must still agree on whether it is whole."""
    monkeypatch.setattr("forebay.pipeline.pulsar.chunks.SEARCH_BYTES", 2500)
    source = random.Random(seed)
    waiting = [pulsar.chunks(source.randbytes(300), 60, f"p-{number}") for number in range(20)]
    payloads = [data[-60:] for chunks in waiting for data in chunks]
    entries: list[bytes] = []
    while waiting := [chunks for chunks in waiting if chunks]:
        entries.append(source.choice(waiting[:6]).pop(0))
    with closing(at(tmp_path)) as store:
        for number, first in enumerate(range(0, len(entries), 30)):
            put_ledger(store, number, entries[first : first + 30], block_bytes=1024)
    rows = rows_of(replace(options_of(tmp_path), split_bytes=1))
    stored = [row["value"] for row in rows]
    assert {row["__kind"] for row in rows} == {Kind.MESSAGE.value, Kind.INCOMPLETE.value}
    assert sum(len(value) for value in stored) == 20 * 300
    assert all(sum(payload in value for value in stored) == 1 for payload in payloads)


def _message(offset: int, payload: bytes) -> StreamMessage:
    return StreamMessage(
        payload=payload,
        msg_id=MessageId(topic_name="/default/orders", topic_offset=offset),
        publish_time=pulsar.TIME,
        attributes={"n": str(offset)},
        routing_key=f"k{offset}",
    )


def test_ledgers_that_forebay_writes_are_read(tmp_path: Path) -> None:
    """A frame is stored as an ordinary message of Pulsar."""
    payloads = [b"%d" % number * 40 for number in range(50)]
    frames = scan(
        b"".join(
            encode_frame(offset, encode_message(_message(offset, payload), offset))
            for offset, payload in enumerate(payloads, 100)
        )
    )
    packer = FramePacker(2048)
    data = b"".join(bytes(block) for block in packer.add(frames)) + bytes(packer.finish())
    custom = ((MANAGED_LEDGER, ORDERS.encode()), ("forebay/topic", b"/default/orders"))
    metadata = LedgerMetadata(packer.packer.entry_bytes, 49, created_ms=5, custom=custom)
    index = encode_index(LedgerIndex(len(data), metadata, tuple(packer.packer.blocks)))
    uid = "0d5b7ca9-0000-4000-8000-000000000001"
    with closing(at(tmp_path)) as store:
        store.put_object(f"{uid}-ledger-7", data)
        store.put_object(f"{uid}-ledger-7-index", index)
    columns = "value,__key,__messageProperties,__kind,__entryId"
    rows = rows_of(options_of(tmp_path, columns=columns, startingTimestamp=1))
    assert rows == [
        {
            "value": payload,
            "__key": b"k%d" % offset,
            "__messageProperties": [("n", str(offset))],
            "__kind": "message",
            "__entryId": offset - 100,
        }
        for offset, payload in enumerate(payloads, 100)
    ]
