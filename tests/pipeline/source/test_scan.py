"""Scans without Spark: planned once, read in splits, every message exactly once."""

from __future__ import annotations

import pickle
import tempfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.catalog.kv import Put
from forebay.errors import (
    CorruptFrame,
    ForeignObject,
    LostOffsets,
    MissingData,
    OffsetOutOfRange,
    UsageError,
)
from forebay.format.names import parse_topic
from forebay.pipeline.source.options import scan_options
from forebay.pipeline.source.scan import plan_scan, read_split
from forebay.settings import WalSettings
from forebay.topic.resources import StoreResources, close_executor_resources
from forebay.topic.store import Store
from forebay.topic.view import StoreView
from support.holed_topics import END, HELD, accept, leave_a_wide_hole
from support.scan_stores import (
    append,
    fill_both_tiers,
    offsets,
    planned,
    read,
    rows_there,
    scanned,
    settings_of,
)

ORDERS = "/default/orders"


@pytest.fixture(autouse=True)
def _closed() -> None:
    """Each test has a store of its own."""
    close_executor_resources()


def test_a_scan_gives_every_row_of_both_tiers(tmp_path: Path) -> None:
    topics = [ORDERS, "/eu/returns", "/default/clicks-part-0", "/default/clicks-part-11"]
    with Store(settings_of(tmp_path)) as store:
        for number, topic in enumerate(topics):
            fill_both_tiers(store.topic(topic), 10 + number)
    wanted = rows_there(settings_of(tmp_path), *topics)
    found = scanned(tmp_path, subscribe="orders,/eu/returns,clicks", includeHeaders=True)
    key = ("topic", "partition", "offset")
    assert found == sorted(wanted, key=lambda row: [row[name] for name in key])


def test_a_partition_can_be_subscribed_alone(tmp_path: Path) -> None:
    with Store(settings_of(tmp_path)) as store:
        for number in range(3):
            append(store.topic(f"clicks-part-{number}"), 5 + number)
    rows = scanned(tmp_path, subscribe="clicks-part-2")
    assert {(row["topic"], row["partition"]) for row in rows} == {("/default/clicks", 2)}
    assert offsets(rows) == list(range(7))


@pytest.mark.parametrize("split_bytes", ["64KiB", "200KiB", "400KiB"])
def test_small_splits_cut_inside_objects_and_segments(tmp_path: Path, split_bytes: str) -> None:
    with Store(settings_of(tmp_path)) as store:
        fill_both_tiers(store.topic(ORDERS), 3000)
    splits = planned(tmp_path, subscribe="orders", splitBytes=split_bytes)
    assert len(splits) > 2
    inside = [piece for split in splits for piece in split.pieces if piece.begin > 0]
    assert any(piece.descriptor is not None for piece in inside)
    assert offsets(read(tmp_path, splits, subscribe="orders")) == list(range(12000))
    assert pickle.loads(pickle.dumps(splits)) == splits


def test_more_partitions_are_made_when_they_are_asked_for(tmp_path: Path) -> None:
    with Store(settings_of(tmp_path)) as store:
        fill_both_tiers(store.topic(ORDERS), 3000)
    assert len(planned(tmp_path, subscribe="orders")) == 1
    splits = planned(tmp_path, subscribe="orders", minPartitions=6)
    assert len(splits) >= 6
    assert offsets(read(tmp_path, splits, subscribe="orders")) == list(range(12000))


def test_small_topics_share_a_split(tmp_path: Path) -> None:
    with Store(settings_of(tmp_path)) as store:
        for number in range(20):
            append(store.topic(f"t{number}"), 5)
    splits = planned(tmp_path, subscribePattern="t.*")
    assert len(splits) == 1
    assert len(read(tmp_path, splits, subscribePattern="t.*")) == 100


def test_a_scan_is_a_snapshot(tmp_path: Path) -> None:
    with Store(settings_of(tmp_path)) as store:
        topic = store.topic(ORDERS)
        append(topic, 10)
        splits = planned(tmp_path, subscribe="orders")
        append(topic, 10)
        assert offsets(read(tmp_path, splits, subscribe="orders")) == list(range(10))
        assert offsets(scanned(tmp_path, subscribe="orders")) == list(range(20))


def test_unsynced_messages_are_not_seen(tmp_path: Path) -> None:
    wal = WalSettings(fsync_interval_ms=600_000)
    with Store(settings_of(tmp_path, wal=wal)) as store:
        topic = store.topic(ORDERS)
        append(topic, 10)
        topic.append(b"not yet")
        assert len(scanned(tmp_path, subscribe="orders")) == 10
        topic.flush()
        assert len(scanned(tmp_path, subscribe="orders")) == 11


def test_another_topics_object_of_the_same_range_and_size_gives_no_rows(tmp_path: Path) -> None:
    with Store(settings_of(tmp_path)) as store:
        for name in (ORDERS, "/default/others"):
            topic = store.topic(name)
            append(topic, 30)
            topic.rotate()
            topic.upload()
            topic.trim_local()
    mine, foreign = (
        next((tmp_path / "objects").rglob(f"{name}/objects/data-*.dnb1"))
        for name in ("orders", "others")
    )
    assert mine.stat().st_size == foreign.stat().st_size
    mine.write_bytes(foreign.read_bytes())
    with pytest.raises(ForeignObject, match=mine.name):
        scanned(tmp_path, subscribe="orders")
    assert len(scanned(tmp_path, subscribe="others")) == 30


def test_a_wrong_index_leaves_out_no_row(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    with Store(settings) as store:
        topic = store.topic(ORDERS)
        append(topic, 3000)
        topic.rotate()
        topic.upload()
        topic.trim_local()
    with closing(StoreResources(settings)) as resources:
        name = parse_topic(ORDERS)
        [made] = resources.catalog.get_object_descriptors(name)
        first, *rest = made.offset_index or ()
        wrong = replace(made, offset_index=(first, *((at, place + 9) for at, place in rest)))
        assert resources.catalog.replace_descriptor(name, made, wrong)
    found = scanned(tmp_path, subscribe="orders", splitBytes="64KiB")
    assert offsets(found) == list(range(3000))


def test_a_topic_without_messages_has_no_splits(tmp_path: Path) -> None:
    with Store(settings_of(tmp_path)) as store:
        store.topic(ORDERS)
        assert planned(tmp_path, subscribe="orders") == []
        assert planned(tmp_path, subscribePattern="nothing.*") == []


# ---- what is gone after planning ----


def test_a_segment_that_retention_took_is_read_from_its_object(tmp_path: Path) -> None:
    with Store(settings_of(tmp_path)) as store:
        topic = store.topic(ORDERS)
        append(topic, 50)
        topic.rotate()
        append(topic, 50)
        splits = planned(tmp_path, subscribe="orders")
        assert all(piece.path is not None for split in splits for piece in split.pieces)
        topic.rotate()
        topic.upload()
        append(topic, 50)
        assert len(topic.trim_local()) == 2
        assert offsets(read(tmp_path, splits, subscribe="orders")) == list(range(100))


def test_a_segment_that_is_nowhere_is_missing_data(tmp_path: Path) -> None:
    with Store(settings_of(tmp_path)) as store:
        append(store.topic(ORDERS), 50)
    splits = planned(tmp_path, subscribe="orders")
    path = splits[0].pieces[0].path
    assert path is not None
    path.rename(path.with_suffix(".hidden"))
    with pytest.raises(MissingData, match=r"/default/orders: .*offset"):
        read(tmp_path, splits, subscribe="orders")


def test_an_object_that_another_one_replaced_is_planned_anew(tmp_path: Path) -> None:
    with Store(settings_of(tmp_path)) as store:
        fill_both_tiers(store.topic(ORDERS))
    splits = planned(tmp_path, subscribe="orders")
    with StoreView(settings_of(tmp_path)) as store_view:
        view = store_view.topic(ORDERS)
        old = view.objects()[0]
        resources = store_view.resources()
        assert resources is not None
        keys = resources.catalog.keys
        entry = resources.catalog.kv.get(keys.descriptor(view.topic, 0))
        assert entry is not None
        folder = tmp_path / "objects/storage/topics/default/orders/objects"
        (folder / old.object_id).rename(folder / "data-0-29-1.dnb1")
        text = entry.value.replace(old.object_id.encode(), b"data-0-29-1.dnb1")
        resources.catalog.kv.commit([], [Put(entry.key, text)])
    assert offsets(read(tmp_path, splits, subscribe="orders")) == list(range(120))


def test_a_missing_object_is_an_error_that_names_it(tmp_path: Path) -> None:
    with Store(settings_of(tmp_path)) as store:
        fill_both_tiers(store.topic(ORDERS))
    splits = planned(tmp_path, subscribe="orders")
    (tmp_path / "objects/storage/topics/default/orders/objects/data-0-29.dnb1").unlink()
    with pytest.raises(MissingData, match=r"default/orders/objects/data-0-29\.dnb1"):
        read(tmp_path, splits, subscribe="orders")


# ---- by catalog and store ----


def test_a_catalog_and_a_store_are_enough_for_what_is_uploaded(tmp_path: Path) -> None:
    with Store(settings_of(tmp_path)) as store:
        fill_both_tiers(store.topic(ORDERS))
    options = scan_options(
        {
            "catalog": str(tmp_path / "catalog.db"),
            "store": str(tmp_path / "objects"),
            "subscribe": "orders",
            "columns": "offset",
        }
    )
    rows = [
        row["offset"]
        for split in plan_scan(options)
        for batch in read_split(options.settings, split, options.columns)
        for row in batch.to_pylist()
    ]
    assert rows == list(range(60))


def test_a_place_without_a_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=str(tmp_path / "nothing")):
        planned(tmp_path / "nothing", subscribe="orders")


# ---- damage ----


@pytest.mark.parametrize("name", ["data-30-59.dnb1", "wal.2.log", "wal.3.log"])
def test_a_damaged_frame_is_an_error_with_its_place(tmp_path: Path, name: str) -> None:
    with Store(settings_of(tmp_path)) as store:
        fill_both_tiers(store.topic(ORDERS))
    (path,) = tmp_path.rglob(name)
    data = bytearray(path.read_bytes())
    at = len(data) // 2
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptFrame, match=rf"default/orders.*{name}.* at position \d+") as caught:
        scanned(tmp_path, subscribe="orders")
    assert caught.value.position <= at


def test_a_segment_that_was_cut_is_an_error(tmp_path: Path) -> None:
    with Store(settings_of(tmp_path)) as store:
        append(store.topic(ORDERS), 20)
    splits = planned(tmp_path, subscribe="orders")
    (path,) = tmp_path.rglob("wal.log")
    data = path.read_bytes()
    for size in (len(data) // 2, 0):
        path.write_bytes(data[:size])
        with pytest.raises(CorruptFrame, match=r"/default/orders: .*wal\.log"):
            read(tmp_path, splits, subscribe="orders")


# ---- ranges ----


def test_offsets_bound_what_is_read(tmp_path: Path) -> None:
    with Store(settings_of(tmp_path)) as store:
        fill_both_tiers(store.topic(ORDERS))
        append(store.topic("/eu/returns"), 9)
    json = '{"orders": {"0": %d}, "/eu/returns": {"0": %d}}'
    for first, after in ((0, 120), (7, 8), (25, 35), (29, 31), (59, 61), (95, 119), (40, 40)):
        rows = scanned(
            tmp_path,
            subscribe="orders,/eu/returns",
            startingOffsets=json % (first, -2),
            endingOffsets=json % (after, 4),
        )
        assert [row["offset"] for row in rows if row["topic"] == ORDERS] == [*range(first, after)]
        assert [row["offset"] for row in rows if row["topic"] != ORDERS] == [*range(4)]


def test_json_has_to_name_the_topics_that_are_read(tmp_path: Path) -> None:
    with Store(settings_of(tmp_path)) as store:
        for name in ("a", "b"):
            append(store.topic(name), 3)
    with pytest.raises(UsageError, match="leaves out /default/b 0"):
        planned(tmp_path, subscribe="a,b", startingOffsets='{"a": {"0": 1}}')
    with pytest.raises(UsageError, match=r"/default/b 0.* not subscribed"):
        planned(tmp_path, subscribe="a", endingOffsets='{"a": {"0": 1}, "b": {"0": 1}}')


def test_offsets_beyond_the_topic_are_data_loss(tmp_path: Path) -> None:
    with Store(settings_of(tmp_path)) as store:
        append(store.topic(ORDERS), 9)
    beyond = {"subscribe": "orders", "endingOffsets": '{"orders": {"0": 10}}'}
    with pytest.raises(OffsetOutOfRange, match=r"/default/orders: the ending offset 10"):
        planned(tmp_path, **beyond)
    assert offsets(scanned(tmp_path, **beyond, failOnDataLoss=False)) == list(range(9))


def test_offsets_that_retention_removed_are_data_loss(tmp_path: Path) -> None:
    with Store(settings_of(tmp_path)) as store:
        fill_both_tiers(store.topic(ORDERS))
    with StoreView(settings_of(tmp_path)) as store_view:
        view, resources = store_view.topic(ORDERS), store_view.resources()
        assert resources is not None
        assert resources.catalog.retire(view.topic, None, view.objects()[0])
    below = {"subscribe": "orders", "startingOffsets": '{"orders": {"0": 7}}'}
    with pytest.raises(OffsetOutOfRange, match=r"/default/orders: the starting offset 7"):
        planned(tmp_path, **below)
    assert offsets(scanned(tmp_path, **below, failOnDataLoss=False)) == list(range(30, 120))
    assert offsets(scanned(tmp_path, subscribe="orders")) == list(range(30, 120))


def lose_a_log(data: Path) -> None:
    """Ten messages in an object, then a hole, then ten more in a new log."""
    with Store(settings_of(data)) as store:
        append(store.topic(ORDERS), 10)
        store.topic(ORDERS).upload()
        append(store.topic(ORDERS), 5)
    (data / "wal").rename(data / "lost")
    with Store(settings_of(data)) as store:
        append(store.topic(ORDERS), 10)


def test_a_lost_range_is_an_error_that_names_it(tmp_path: Path) -> None:
    lose_a_log(tmp_path)
    with pytest.raises(LostOffsets, match=r"/default/orders: offsets 10 to \d+ are lost") as caught:
        planned(tmp_path, subscribe="orders")
    after = caught.value.end
    rows = scanned(tmp_path, subscribe="orders", failOnDataLoss=False)
    assert offsets(rows) == [*range(10), *range(after, after + 10)]
    before = scanned(tmp_path, subscribe="orders", endingOffsets='{"orders": {"0": 10}}')
    assert offsets(before) == list(range(10))


def test_accepted_offsets_are_no_rows_and_no_splits(tmp_path: Path) -> None:
    leave_a_wide_hole(tmp_path)
    with pytest.raises(LostOffsets, match="forebay accept-loss /default/orders"):
        planned(tmp_path, subscribe="orders")
    accept(tmp_path)
    both = [*range(HELD), *range(END, END + HELD)]
    assert offsets(scanned(tmp_path, subscribe="orders")) == both
    splits = planned(tmp_path, subscribe="orders", minPartitions=7)
    assert len(splits) <= 7
    assert sum(split.count for split in splits) == 2 * HELD
    inside = f'{{"orders": {{"0": {HELD + 4}}}}}'
    assert offsets(scanned(tmp_path, subscribe="orders", startingOffsets=inside)) == both[HELD:]
    assert offsets(scanned(tmp_path, subscribe="orders", endingOffsets=inside)) == both[:HELD]


# ---- any history, any split, any range ----

steps = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 400)),
        st.tuples(st.sampled_from(["rotate", "upload", "trim", "lose"]), st.just(0)),
    ),
    max_size=14,
)


def live_through(path: Path, history: list[tuple[str, int]]) -> set[int]:
    """Does what the steps say to a topic; answers the offsets that are still there."""
    kept: set[int] = set()
    store = Store(settings_of(path))
    try:
        topic = store.topic(ORDERS)
        for step, count in history:
            if step == "append":
                first = topic.watermarks().appended
                append(topic, count, 300)
                kept |= set(range(first, first + count))
            elif step == "rotate":
                topic.rotate()
            elif step == "upload":
                topic.upload()
            elif step == "trim":
                topic.trim_local()
            else:
                uploaded = topic.watermarks().uploaded
                store.close()
                (path / "wal").rename(path / f"lost{len(list(path.iterdir()))}")
                kept = {offset for offset in kept if offset < uploaded}
                store = Store(settings_of(path))
                topic = store.topic(ORDERS)
    finally:
        store.close()
    return kept


@settings(max_examples=40, deadline=None)
@given(steps, st.sampled_from([64, 80, 100, 300, 10**6]), st.integers(1, 9), st.data())
def test_a_scan_of_any_history_is_exact(
    history: list[tuple[str, int]], split_kib: int, least: int, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        kept = live_through(path, history)
        with StoreView(settings_of(path)) as store:
            view = store.topic(ORDERS)
            first = data.draw(st.integers(view.start_offset, view.end_offset))
            last = data.draw(st.integers(first, view.end_offset))
        options = {
            "subscribe": "orders",
            "startingOffsets": f'{{"orders": {{"0": {first}}}}}',
            "endingOffsets": f'{{"orders": {{"0": {last}}}}}',
            "splitBytes": f"{split_kib}KiB",
            "minPartitions": least,
            "failOnDataLoss": False,
        }
        rows = scanned(path, **options)
        close_executor_resources()
    assert offsets(rows) == sorted(offset for offset in kept if first <= offset < last)
    for row in rows:
        assert row["value"].startswith(b"/default/orders %d " % row["offset"])
