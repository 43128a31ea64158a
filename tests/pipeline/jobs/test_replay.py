"""`replay`: a range of one topic into another, in order, once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Container
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

import forebay
from forebay.cli.export import replay as command
from forebay.clock import SYSTEM_CLOCK
from forebay.errors import OffsetOutOfRange, ServiceUnavailable, UsageError
from forebay.format.message import StreamMessage
from forebay.format.names import parse_topic
from forebay.pipeline.jobs.replay import replay
from forebay.pipeline.sink.commit import MARK
from forebay.settings import StoreSettings, WalSettings
from forebay.topic.resources import StoreResources, close_executor_resources
from forebay.upload.restore import RestoreChoices, restore_topic
from support.inline_executor import InlineExecutor
from support.paths import TESTS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SOURCE, TARGET = "/default/orders", "/default/again"


class ThisProcess(InlineExecutor):
    """Does the work of executors here; the items of which the number is in `failing` fail."""

    def __init__(self, failing: Container[int] = ()) -> None:
        super().__init__(slots=3)
        self.before = self._fail
        self._failing = failing

    def _fail(self, _item: object) -> None:
        if len(self.items) in self._failing:
            raise ServiceUnavailable("the store does not answer")


@pytest.fixture
def settings(tmp_path: Path) -> StoreSettings:
    """A store whose source is in objects, sealed segments and the active one."""
    settings = StoreSettings(tmp_path / "data", wal=WalSettings(rotate_max_bytes=200_000))
    with forebay.open(settings) as store:
        topic = store.topic(SOURCE)
        for first in range(0, 6000, 1000):
            topic.append_many(
                [b"%06d" % at + bytes(100) for at in range(first, first + 1000)],
                attributes=[
                    {"n": str(at)} if at % 2 else None for at in range(first, first + 1000)
                ],
                routing_keys=[f"k{at % 7}" for at in range(first, first + 1000)],
            )
            if first == 2000:
                topic.upload()
    return settings


def read(settings: StoreSettings, topic: str = TARGET) -> list[StreamMessage]:
    with forebay.open(settings) as store:
        return list(store.topic(topic).read())


def numbers(settings: StoreSettings) -> list[int]:
    return [int(message.payload[:6]) for message in read(settings)]


def staged(settings: StoreSettings) -> list[Path]:
    assert settings.data is not None
    return list((Path(settings.data) / "objects").rglob("staging/*/*"))


def test_a_range_arrives_in_its_order_with_all_that_it_says(settings: StoreSettings) -> None:
    report = replay(settings, SOURCE, TARGET, start=500, end=5500, executor=ThisProcess())
    assert (report.ok, report.appended, report.known) == (True, 5000, 0)
    before, after = read(settings, SOURCE)[500:5500], read(settings)
    for old, new in zip(before, after, strict=True):
        new.attributes.pop(MARK)
        assert (new.payload, new.attributes, new.routing_key) == (
            old.payload,
            old.attributes,
            old.routing_key,
        )
    assert staged(settings) == []


def test_a_second_run_adds_nothing_and_a_longer_one_the_rest(settings: StoreSettings) -> None:
    for end, appended in ((2000, 2000), (2000, 0), (1000, 0), (None, 4000), (None, 0)):
        executor = ThisProcess()
        report = replay(settings, SOURCE, TARGET, end=end, executor=executor)
        assert (report.ok, report.appended) == (True, appended)
        assert (len(executor.items) > 0) == (appended > 0)
    assert numbers(settings) == list(range(6000))
    with forebay.open(settings) as store:
        store.topic(SOURCE).append(b"006000")
    assert replay(settings, SOURCE, TARGET, executor=ThisProcess()).appended == 1
    assert numbers(settings) == list(range(6001))


def test_another_start_another_id_or_again_is_another_replay(settings: StoreSettings) -> None:
    def run(**options: object) -> int:
        return replay(settings, SOURCE, TARGET, end=10, executor=ThisProcess(), **options).appended  # type: ignore[arg-type]

    assert [run(), run(start=0), run(start=5), run(sink_id="b"), run(again=True)] == [
        10,
        10,
        5,
        10,
        10,
    ]
    assert [run(), run(start=5), run(sink_id="b"), run(again=True)] == [0, 0, 0, 10]


def test_a_dry_run_says_what_would_be_done(settings: StoreSettings) -> None:
    replay(settings, SOURCE, TARGET, start=0, end=1000, executor=ThisProcess())
    report = replay(settings, SOURCE, TARGET, start=0, dry_run=True)
    assert (report.appended, report.known, report.ok) == (5000, 1000, True)
    assert len(read(settings)) == 1000


def test_a_failed_batch_is_told_and_the_next_run_goes_on(settings: StoreSettings) -> None:
    report = replay(settings, SOURCE, TARGET, executor=ThisProcess(failing={2}))
    assert not report.ok
    assert report.rows[-1].error == "the store does not answer"
    assert (read(settings), staged(settings)) == ([], [])
    assert replay(settings, SOURCE, TARGET, executor=ThisProcess()).appended == 6000
    assert numbers(settings) == list(range(6000))


def test_a_killed_replay_goes_on_where_it_was(settings: StoreSettings) -> None:
    """The driver dies while it appends; the next run may have another end, but not a lower one."""
    code = (
        "import os, signal, sys; sys.path[:0] = sys.argv[1].split(os.pathsep);"
        "from test_replay import *; from forebay.pipeline.sink.owner import LocalTopicWriter;"
        "calls = []; append = LocalTopicWriter.append;"
        "LocalTopicWriter.append = lambda self, *rows: (calls.append(1), append(self, *rows), "
        "len(calls) == 2 and (self.flush(), os.kill(os.getpid(), signal.SIGKILL)));"
        "settings = StoreSettings(Path(sys.argv[2]), wal=WalSettings(rotate_max_bytes=200_000));"
        "replay(settings, SOURCE, TARGET, end=5000, executor=ThisProcess())"
    )
    modules = os.pathsep.join(map(str, (Path(__file__).parent, TESTS)))
    command = [sys.executable, "-c", code, modules, str(settings.data)]
    assert subprocess.run(command, check=False).returncode == -9
    there = len(numbers(settings))
    assert 0 < there < 5000
    with pytest.raises(UsageError, match="5000 or later"):
        replay(settings, SOURCE, TARGET, end=4000, executor=ThisProcess())
    report = replay(settings, SOURCE, TARGET, executor=ThisProcess())
    assert (report.appended, report.known) == (6000 - there, there)
    assert numbers(settings) == list(range(6000))
    assert staged(settings) == []


def test_what_a_restored_target_has_of_a_replay_is_not_guessed(settings: StoreSettings) -> None:
    replay(settings, SOURCE, TARGET, end=1000, executor=ThisProcess())
    with forebay.open(settings) as store:
        for name in (SOURCE, TARGET):
            store.topic(name).upload()
    close_executor_resources()
    for file in Path(settings.data or "").glob("catalog*"):
        file.unlink()
    resources = StoreResources(settings, SYSTEM_CLOCK)
    for name in (SOURCE, TARGET):
        topic = parse_topic(name)
        restore_topic(
            resources.catalog, resources.store, resources.session, topic, RestoreChoices()
        )
    resources.close()
    with pytest.raises(UsageError, match="unknown how far that replay got"):
        replay(settings, SOURCE, TARGET, end=2000, executor=ThisProcess())
    rest = replay(settings, SOURCE, TARGET, start=1000, end=2000, executor=ThisProcess())
    assert (rest.ok, rest.appended) == (True, 1000)
    assert numbers(settings) == list(range(2000))


def test_times_are_those_of_publishing(settings: StoreSettings) -> None:
    times = [message.publish_time for message in read(settings, SOURCE)]
    middle = times[3000]
    first = times.index(middle)
    report = replay(settings, SOURCE, TARGET, start_time=middle, executor=ThisProcess())
    assert (report.start_offset, report.end_offset) == (first, 6000)
    rest = replay(settings, SOURCE, TARGET, end_time=middle, executor=ThisProcess())
    assert (rest.start_offset, rest.end_offset) == (0, first)
    assert sorted(numbers(settings)) == list(range(6000))


@pytest.mark.parametrize(
    ("call", "why"),
    [
        ({"into": "orders"}, "cannot be replayed into itself"),
        ({"into": "orders-part-0"}, "both partition 0 of /default/orders"),
        ({"start": 1, "start_time": 1}, "the start is given as an offset and as a time"),
        ({"end": 1, "end_time": 1}, "the end is given as an offset and as a time"),
        ({"start": -1}, "must not be negative"),
        ({"start": 10, "end": 5}, "the end, 5, is before the start, 10"),
        ({"start": 10, "end": 5, "skip_lost": True}, "the end, 5, is before the start, 10"),
        ({"start_time": 10, "end_time": 5}, "the end, 5, is before the start, 10"),
        ({"sink_id": "a b"}, "sinkId"),
        ({"sink_id": "a", "again": True}, "either a sink id or `again`"),
        ({"topic": "nothing"}, "there is no topic /default/nothing"),
    ],
)
def test_calls_that_cannot_be_right_are_refused(
    settings: StoreSettings, call: dict[str, object], why: str
) -> None:
    given = {"topic": SOURCE, "into": TARGET, **call}
    with pytest.raises(UsageError, match=why):
        replay(settings, **given, executor=ThisProcess())  # type: ignore[arg-type]


def test_offsets_that_are_not_in_the_topic_are_an_error(settings: StoreSettings) -> None:
    with pytest.raises(OffsetOutOfRange, match="6001"):
        replay(settings, SOURCE, TARGET, end=6001, executor=ThisProcess())


def test_on_spark_it_is_the_same(spark: SparkSession, settings: StoreSettings) -> None:
    seen: list[tuple[int, int]] = []
    report = replay(settings, SOURCE, TARGET, spark=spark, progress=lambda *at: seen.append(at))
    assert (report.ok, report.appended) == (True, 6000)
    assert numbers(settings) == list(range(6000))
    assert seen
    frame = report.dataframe(spark)
    assert [row.appended for row in frame.collect()] == [6000]


def test_the_command_line_tells_people_and_programs(settings: StoreSettings) -> None:
    data = str(settings.data)
    run = CliRunner().invoke
    dry = ["--dry-run", "--data", data]
    told = run(command, [SOURCE, TARGET, "--start", "10", *dry])
    assert told.exit_code == 0, told.output
    assert "would append 5990 messages (--sink-id replay)" in told.output
    found = json.loads(
        run(command, [SOURCE, TARGET, "--until", "2020-01-01", "--json", *dry]).output
    )
    assert (found["appended"], found["end_offset"], found["ok"]) == (0, 0, True)
    bad = run(command, [SOURCE, TARGET, "--since", "yesterday", *dry])
    assert bad.exit_code == 2
    assert "must be like 2026-01-31T12:00:00Z" in bad.output
