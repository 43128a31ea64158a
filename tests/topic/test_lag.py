"""The lag of a subscription in bytes and in time is that of what it has not acknowledged."""

from __future__ import annotations

from pathlib import Path

from forebay.format.names import parse_topic
from forebay.limits import LAG_OBJECTS_MAX
from forebay.settings import DeleterSettings, StoreSettings, UploaderSettings
from forebay.topic.lag import Lags, Part, SeenLog, bytes_in, estimated_to
from forebay.topic.store import Store, Topic

PARTS = [Part(0, 10, 1000), Part(10, 20, 400), Part(20, 30, 600)]


def test_whole_parts_count_whole_and_others_by_their_share() -> None:
    assert bytes_in(PARTS, [(0, 30)]) == 2000
    assert bytes_in(PARTS, [(5, 30)]) == 500 + 400 + 600
    assert bytes_in(PARTS, [(5, 6), (8, 12), (29, 30)]) == 100 + 200 + 80 + 60
    assert bytes_in(PARTS, []) == 0
    assert bytes_in([], [(0, 30)]) == 0
    assert bytes_in(PARTS, [(30, 40)]) == 0


def filled(store: Store) -> Topic:
    """Ten messages in an object alone, five in a segment."""
    topic = store.topic("orders")
    topic.append_many([b"x" * 100] * 10, durability="synced")
    topic.upload()
    topic.rotate()
    topic.append_many([b"y"] * 5, durability="synced")
    topic.trim_local()
    return topic


def settings(path: Path) -> StoreSettings:
    return StoreSettings(
        data=path,
        uploader=UploaderSettings(enabled=False),
        deleter=DeleterSettings(retention_size_mb=0, deletion_lag_minutes=0),
    )


def test_the_age_is_that_of_the_oldest_message(tmp_path: Path) -> None:
    with Store(settings(tmp_path)) as store:
        log = SeenLog.of_topic(filled(store))
        published = next(iter(store.topic("orders").read(3))).publish_time
        found = Lags(store.catalog, lambda: published + 5000)
        assert found.of(log, [(3, 15)]).seconds == 5.0
        assert found.of(log, []) == (0, 0.0)


def test_a_clock_that_went_back_makes_no_negative_age(tmp_path: Path) -> None:
    with Store(settings(tmp_path)) as store:
        log = SeenLog.of_topic(filled(store))
        assert Lags(store.catalog, lambda: 0).of(log, [(0, 15)]).seconds == 0.0


def test_a_message_is_read_once(tmp_path: Path) -> None:
    with Store(settings(tmp_path)) as store:
        seen = SeenLog.of_topic(filled(store))
        reads: list[int] = []

        def read(start: int, end: int) -> object:
            reads.append(start)
            return seen.read(start, end)

        log = SeenLog(seen.topic, seen.end, seen.segments, read)  # type: ignore[arg-type]
        found = Lags(store.catalog)
        for _ in range(3):
            found.of(log, [(0, 15)])
            found.of(log, [(12, 15)])
        assert reads == [0, 12]


def test_cheap_calls_read_few_messages_from_objects(tmp_path: Path) -> None:
    with Store(settings(tmp_path)) as store:
        log = SeenLog.of_topic(filled(store))
        found = Lags(store.catalog)
        ages = [found.of(log, [(offset, 15)], cheap=True).seconds for offset in range(10)]
        assert [age is None for age in ages] == [False] * 8 + [True] * 2
        assert found.of(log, [(12, 15)], cheap=True).seconds is not None, "from a segment"
        assert found.of(log, [(9, 15)]).seconds is not None, "one that need not be cheap"


def test_an_offset_that_retention_removed_has_no_age(tmp_path: Path) -> None:
    with Store(settings(tmp_path)) as store:
        topic = filled(store)
        gone = SeenLog(parse_topic("other"), 15, topic.segments(), SeenLog.of_topic(topic).read)
        assert Lags(None).of(gone, [(99, 120)]).seconds is None


def test_beyond_a_number_of_objects_the_rest_is_estimated() -> None:
    parts = [Part(at, at + 1, 10) for at in range(LAG_OBJECTS_MAX)]
    found = estimated_to(2 * LAG_OBJECTS_MAX, parts)
    assert bytes_in(found, [(0, 2 * LAG_OBJECTS_MAX)]) == 20 * LAG_OBJECTS_MAX
