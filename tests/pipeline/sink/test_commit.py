"""A batch is appended once, whatever is committed again, and no row is dropped in silence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql.types import StringType, StructField, StructType

import forebay
from forebay.catalog.job_state import ANYTHING, read_job_state, write_job_state
from forebay.errors import ForebayError, TopicOwned, UsageError
from forebay.format.names import parse_topic
from forebay.pipeline.sink.commit import (
    MARK,
    Committed,
    Position,
    Run,
    SinkBatch,
    SinkState,
    check_sink_id,
    commit_batch,
    decode_state,
    encode_state,
    mark_prefix,
    parse_mark,
    run_of,
    state_name,
)
from forebay.pipeline.sink.owner import LocalTopicWriter
from forebay.pipeline.sink.staging import Part, Rows, discard
from forebay.pipeline.sink.writer import ForebayWriter, StagedPart
from forebay.topic.resources import StoreResources
from forebay.upload.restore import RestoreChoices, restore_topic
from support.sinks import OTHER, TOPIC, SinkSetup, marks, numbered

RUN = SinkBatch("daily", 0, named=True)


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[SinkSetup]:
    setup = SinkSetup(tmp_path / "data")
    yield setup
    setup.close()


class Interrupted(RuntimeError):
    """The driver dies here."""


class DyingWriter(LocalTopicWriter):
    """Appends so many rows, and then no more; what it appended is in the log."""

    def __init__(self, setup: SinkSetup, rows: int) -> None:
        super().__init__(setup.settings)
        self._left = rows

    def append(self, topic, payloads, attributes, keys) -> None:  # type: ignore[no-untyped-def]
        count = min(self._left, len(payloads))
        super().append(topic, payloads[:count], attributes[:count], keys[:count])
        self._left -= count
        if count < len(payloads):
            self.flush()
            raise Interrupted


def interrupt(setup: SinkSetup, run: SinkBatch, parts: list[Part], rows: int) -> None:
    """Commits the parts, and dies after so many rows."""
    with pytest.raises(Interrupted), DyingWriter(setup, rows) as writer:
        commit_batch(writer, setup.bench.catalog, setup.bench.store, run, parts)


# ---- once ----


def test_rows_are_appended_in_the_order_of_partitions(setup: SinkSetup) -> None:
    parts = setup.stage(numbered(0, 20), [], numbered(20, 10))
    assert setup.commit(RUN, parts[::-1]) == Committed(30, 0)
    messages = setup.messages()
    assert [message.payload.decode() for message in messages] == [f"{at:06d}" for at in range(30)]
    assert [parse_mark(mark, "daily") for mark in (marks(messages)[0], marks(messages)[-1])] == [
        Position(0, 0, 0, run_of(RUN, [parts[0], parts[2]])),
        Position(0, 2, 9, run_of(RUN, [parts[0], parts[2]])),
    ]
    assert setup.staged() == []


@pytest.mark.parametrize("streaming", [False, True])
def test_a_batch_that_is_committed_again_adds_nothing(setup: SinkSetup, streaming: bool) -> None:
    run = SinkBatch("daily", 3, named=True, streaming=streaming)
    parts = setup.stage(numbered(0, 20), numbered(20, 10))
    assert setup.commit(run, parts) == Committed(30, 0)
    assert setup.commit(run, parts) == Committed(0, 30)
    assert setup.write(run, numbered(0, 30)) == Committed(0, 30)
    assert len(setup.values()) == 30
    assert setup.staged() == []


def test_a_lower_batch_of_a_stream_is_another_checkpoints_and_refused(setup: SinkSetup) -> None:
    """Even if the batches before it had no rows: dropping them as known would lose them."""
    for batch in (1, 2):
        setup.write(SinkBatch("q", batch, named=True, streaming=True), numbered(batch * 10, 10))
    with pytest.raises(UsageError, match="new checkpoint"):
        setup.write(SinkBatch("q", 1, named=True, streaming=True), numbered(70, 10))
    assert setup.values() == [f"{at:06d}" for at in range(10, 30)]


@pytest.mark.parametrize("streaming", [False, True])
def test_as_many_other_rows_under_the_same_id_are_refused(
    setup: SinkSetup, streaming: bool
) -> None:
    run = SinkBatch("daily", 0, named=True, streaming=streaming)
    setup.write(run, numbered(0, 10))
    with pytest.raises(UsageError, match="other rows"):
        setup.write(run, numbered(50, 10))
    assert len(setup.values()) == 10


def test_sinks_with_random_ids_leave_no_note(setup: SinkSetup) -> None:
    run = SinkBatch("once-abc", 0, named=False)
    setup.write(run, numbered(0, 5))
    assert setup.write(run, numbered(5, 5)) == Committed(5, 0)
    assert setup.values() == [f"{at:06d}" for at in range(10)]
    assert read_job_state(setup.bench.catalog, parse_topic(TOPIC), state_name("once-abc")) is None


def test_an_empty_batch_is_nothing(setup: SinkSetup) -> None:
    assert setup.write(RUN, [], []) == Committed(0, 0)
    assert setup.bench.catalog.record(parse_topic(TOPIC)) is None


def test_every_topic_of_a_batch_gets_its_rows_once(setup: SinkSetup) -> None:
    rows = numbered(0, 30, (TOPIC, OTHER, TOPIC))
    assert setup.write(RUN, rows[:15], rows[15:]) == Committed(30, 0)
    assert setup.write(RUN, rows[:15], rows[15:]) == Committed(0, 30)
    for topic in (TOPIC, OTHER):
        assert setup.values(topic) == [value for name, value in rows if name == topic]


def test_two_sinks_of_one_topic_do_not_know_each_other(setup: SinkSetup) -> None:
    for name in ("a", "a.b", "b"):
        assert setup.write(SinkBatch(name, 0, named=True), numbered(0, 5)) == Committed(5, 0)
    assert len(setup.values()) == 15


# ---- partitions ----


def zeros(value: str, *others: str) -> Rows:
    """A row of partition 0 of orders, as the column `partition` gives it, and rows of others."""
    name = f"{TOPIC}-part-0"
    payloads = [value.encode()] * (1 + len(others))
    return Rows([name, *others], payloads, zeros=frozenset({name}))


def topics_of(setup: SinkSetup) -> list[str]:
    with forebay.open(setup.data) as store:
        return store.topics()


def test_partition_0_of_a_topic_without_partitions_is_the_topic(setup: SinkSetup) -> None:
    for batch in (0, 0, 1):
        setup.commit(replace(RUN, number=batch), setup.stage_rows(zeros(f"{batch}"), zeros("x")))
    assert setup.values() == ["0", "x", "1", "x"]
    mixed = setup.stage_rows(zeros("a", TOPIC), Rows([TOPIC], [b"b"]))
    assert setup.commit(replace(RUN, number=2), mixed) == Committed(3, 0)
    assert setup.values()[4:] == ["a", "a", "b"]
    with pytest.raises(UsageError, match="both partition 0"):
        setup.write(replace(RUN, number=3), [(f"{TOPIC}-part-0", "y")])
    assert topics_of(setup) == [TOPIC]


def test_partition_0_beside_other_partitions_is_a_partition(setup: SinkSetup) -> None:
    """Another task of the batch has the other partition."""
    parts = setup.stage_rows(zeros("0"), Rows([f"{TOPIC}-part-3"], [b"3"]))
    interrupt(setup, RUN, parts, 1)
    assert setup.commit(RUN, parts) == Committed(1, 1)
    later = setup.stage_rows(zeros("later"))
    assert setup.commit(replace(RUN, number=1), later) == Committed(1, 0)
    assert setup.values(f"{TOPIC}-part-0") == ["0", "later"]
    assert setup.values(f"{TOPIC}-part-3") == ["3"]
    with pytest.raises(UsageError, match="both partition 0"):
        setup.write(replace(RUN, number=2), numbered(0, 1))
    assert topics_of(setup) == [f"{TOPIC}-part-0", f"{TOPIC}-part-3"]


def test_partition_0_of_a_topic_with_another_partition_is_a_partition(setup: SinkSetup) -> None:
    setup.write(RUN, [(f"{TOPIC}-part-7", "7"), (f"{TOPIC}-part-x", "no partition")])
    setup.commit(replace(RUN, number=1), setup.stage_rows(zeros("0")))
    assert setup.values(f"{TOPIC}-part-0") == ["0"]


@pytest.mark.parametrize("names", [(TOPIC, f"{TOPIC}-part-0"), (f"{TOPIC}-part-0", TOPIC)])
def test_a_topic_that_would_be_the_same_partition_as_another_is_refused(
    setup: SinkSetup, names: tuple[str, str]
) -> None:
    one, other = names
    with pytest.raises(UsageError, match=r"both partition 0 of /default/orders: .*another name"):
        setup.write(RUN, [(one, "x"), (other, "y")])
    setup.write(RUN, [(one, "x")])
    with pytest.raises(UsageError) as caught:
        setup.write(RUN, [(other, "y")])
    assert f"{other} and {one} are both partition 0 of {TOPIC}" in str(caught.value)
    assert topics_of(setup) == [one]


# ---- a commit that stopped in the middle ----


@pytest.mark.parametrize("rows", [0, 1, 6, 7, 8, 20, 29])
def test_a_half_appended_batch_goes_on_behind_what_is_there(setup: SinkSetup, rows: int) -> None:
    parts = setup.stage(numbered(0, 20), numbered(20, 10))
    interrupt(setup, RUN, parts, rows)
    assert setup.values() == [f"{at:06d}" for at in range(rows)]
    assert setup.commit(RUN, parts) == Committed(30 - rows, rows)
    assert setup.values() == [f"{at:06d}" for at in range(30)]
    assert setup.staged() == []


def test_a_half_appended_batch_ends_with_the_rows_it_began_with(setup: SinkSetup) -> None:
    """A query that runs again may cut its rows otherwise, or find other ones."""
    run = SinkBatch("daily", 0, named=True, streaming=True, query="a")
    interrupt(setup, run, setup.stage(numbered(0, 20), numbered(20, 10)), 11)
    assert setup.write(run, numbered(500, 7), numbered(0, 9)) == Committed(19, 11)
    assert setup.values() == [f"{at:06d}" for at in range(30)]
    assert setup.staged() == []


def test_without_the_first_files_the_same_partitions_go_on(setup: SinkSetup) -> None:
    parts = setup.stage(numbered(0, 20), numbered(20, 10))
    interrupt(setup, RUN, parts, 11)
    discard(setup.bench.store, parts)
    with pytest.raises(UsageError, match="other partitions"):
        setup.write(RUN, numbered(0, 30))
    assert setup.write(RUN, numbered(0, 20), numbered(20, 10)) == Committed(19, 11)
    assert setup.values() == [f"{at:06d}" for at in range(30)]


def test_interrupted_again_and_again_it_comes_to_its_end(setup: SinkSetup) -> None:
    rows = numbered(0, 40, (TOPIC, OTHER))
    for _ in range(6):
        interrupt(setup, RUN, setup.stage(rows[:25], rows[25:]), 5)
    assert setup.write(RUN, rows[:25], rows[25:]) == Committed(10, 30)
    for topic in (TOPIC, OTHER):
        assert setup.values(topic) == [value for name, value in rows if name == topic]


def test_what_others_append_meanwhile_is_passed_over(setup: SinkSetup) -> None:
    parts = setup.stage(numbered(0, 20))
    interrupt(setup, RUN, parts, 8)
    with forebay.open(setup.data) as store:
        store.topic(TOPIC).append_many([b"foreign"] * 50)
        store.topic(TOPIC).append(b"a lie", attributes={MARK: "daily/0/x"})
    assert setup.commit(RUN, parts) == Committed(12, 8)
    assert [value for value in setup.values() if value.isdigit()] == [
        f"{at:06d}" for at in range(20)
    ]


def test_a_later_batch_leaves_a_half_appended_one_as_it_is(
    setup: SinkSetup, caplog: pytest.LogCaptureFixture
) -> None:
    interrupt(setup, RUN, setup.stage(numbered(0, 20)), 8)
    assert setup.write(SinkBatch("daily", 1, named=True), numbered(20, 5)) == Committed(5, 0)
    assert "never completed" in caplog.text
    assert setup.values() == [f"{at:06d}" for at in [*range(8), *range(20, 25)]]


def test_an_aborted_write_keeps_the_files_of_a_batch_that_was_begun(setup: SinkSetup) -> None:
    """Spark aborts a write whose commit failed, and the batch still has to be completed."""
    schema = StructType([StructField("value", StringType())])
    options = {"path": str(setup.data), "topic": TOPIC, "sinkId": "daily"}
    writer = ForebayWriter(options, schema, overwrite=False)
    never_begun = setup.stage(numbered(0, 20))
    writer.abort([*map(StagedPart, never_begun), None])
    assert setup.staged() == []
    begun = setup.stage(numbered(0, 20), numbered(20, 10))
    interrupt(setup, RUN, begun, 11)
    writer.abort([*map(StagedPart, begun)])
    assert setup.write(RUN, numbered(0, 30)) == Committed(19, 11)
    assert setup.values() == [f"{at:06d}" for at in range(30)]
    assert setup.staged() == []


def test_a_write_of_other_rows_completes_the_begun_batch_and_is_refused(setup: SinkSetup) -> None:
    """Success would mean that its own rows had been appended."""
    interrupt(setup, RUN, setup.stage(numbered(0, 20)), 11)
    with pytest.raises(UsageError, match=r"begun with 20 rows, but this one has 5.*complete now"):
        setup.write(RUN, numbered(500, 5))
    assert setup.values() == [f"{at:06d}" for at in range(20)]
    assert setup.staged() == []
    assert setup.write(RUN, numbered(0, 20)) == Committed(0, 20)


# ---- rows that would be dropped ----


def of_query(query: str | None, batch: int) -> SinkBatch:
    return SinkBatch("q", batch, named=True, streaming=True, query=query)


def test_another_query_is_known_only_by_the_same_rows(setup: SinkSetup) -> None:
    """Batch 0 of both is empty, or goes elsewhere, so that only numbers and rows can tell."""
    assert setup.write(of_query("a", 1), numbered(10, 10)) == Committed(10, 0)
    assert setup.write(of_query("b", 0), numbered(0, 10, (OTHER,))) == Committed(10, 0)
    with pytest.raises(
        UsageError, match=r"the sinkId 'q' belongs to another query.*its checkpoint"
    ):
        setup.write(of_query("b", 1), numbered(20, 10))
    with pytest.raises(UsageError, match="Give this query another sinkId"):
        setup.write(of_query("b", 2), numbered(20, 10))
    assert setup.write(of_query("b", 1), numbered(10, 10)) == Committed(0, 10)
    assert setup.values() == [f"{at:06d}" for at in range(10, 20)]


def test_a_query_that_has_repeated_the_last_batch_goes_on(setup: SinkSetup) -> None:
    setup.write(of_query("a", 0), numbered(0, 10))
    assert setup.write(of_query("b", 0), numbered(0, 10)) == Committed(0, 10)
    assert setup.write(of_query("b", 1), numbered(10, 10)) == Committed(10, 0)
    with pytest.raises(UsageError, match="belongs to another query"):
        setup.write(of_query("a", 2), numbered(20, 10))
    assert setup.values() == [f"{at:06d}" for at in range(20)]


@pytest.mark.parametrize("batch", [0, 1])
def test_a_query_that_computes_other_rows_for_its_last_batch_appends_nothing(
    setup: SinkSetup, batch: int
) -> None:
    setup.write(of_query("a", batch), numbered(0, 10))
    assert setup.write(of_query("a", batch), numbered(0, 9)) == Committed(0, 9)
    assert len(setup.values()) == 10


def test_another_query_does_not_complete_a_begun_batch_with_its_own_rows(setup: SinkSetup) -> None:
    interrupt(setup, of_query("a", 1), setup.stage(numbered(0, 20)), 8)
    with pytest.raises(UsageError, match="belongs to another query"):
        setup.write(of_query("b", 1), numbered(50, 20))
    assert len(setup.values()) == 8
    assert setup.write(of_query("a", 1), numbered(50, 20)) == Committed(12, 8)
    assert setup.values() == [f"{at:06d}" for at in range(20)]


ROWS = Rows([TOPIC, TOPIC], [b"1", b"2"], [{"h": "1"}, None], ["a", "b"])


@pytest.mark.parametrize(
    "other",
    [
        replace(ROWS, keys=["a", "c"]),
        replace(ROWS, keys=["a", None]),
        replace(ROWS, keys=None),
        replace(ROWS, attributes=[{"h": "2"}, None]),
        replace(ROWS, attributes=None),
        replace(ROWS, payloads=[b"2", b"1"]),
        Rows([TOPIC, TOPIC], [b"2", b"1"], [None, {"h": "1"}], ["b", "a"]),
        replace(ROWS, topics=[TOPIC, OTHER]),
    ],
    ids=["key", "null-key", "no-keys", "header", "no-headers", "values", "order", "topic"],
)
@pytest.mark.parametrize("batch", [0, 3])
@pytest.mark.parametrize("query", [None, "b"])
def test_rows_that_differ_in_anything_that_is_written_are_other_rows(
    setup: SinkSetup, other: Rows, batch: int, query: str | None
) -> None:
    run = SinkBatch("daily", batch, named=True, query=query and "a")
    setup.commit(run, setup.stage_rows(ROWS))
    with pytest.raises(UsageError, match="sinkId"):
        setup.commit(replace(run, query=query), setup.stage_rows(other))
    again = setup.stage_rows(*(part_of(ROWS, at) for at in range(2)))
    assert setup.commit(replace(run, query=query), again) == Committed(0, 2)
    assert len(setup.messages()) == 2


def part_of(rows: Rows, at: int) -> Rows:
    assert rows.attributes is not None
    assert rows.keys is not None
    return Rows([rows.topics[at]], [rows.payloads[at]], [rows.attributes[at]], [rows.keys[at]])


def test_a_note_of_an_earlier_release_is_compared_by_its_values(setup: SinkSetup) -> None:
    parts = setup.stage(numbered(0, 10))
    setup.commit(of_query(None, 3), parts)
    topic, name = parse_topic(TOPIC), state_name("q")
    data = read_job_state(setup.bench.catalog, topic, name)
    assert data is not None
    older = {k: v for k, v in json.loads(data).items() if k not in ("checksum", "query")}
    assert older["digest"] == parts[0].digest
    later = {**older, "of_a_later_release": 1}
    write_job_state(setup.bench.catalog, topic, name, json.dumps(later).encode(), expected=ANYTHING)
    with pytest.raises(UsageError, match="10 other rows"):
        setup.write(of_query("a", 3), numbered(10, 10))
    assert setup.write(of_query("a", 3), numbered(0, 10)) == Committed(0, 10)
    with pytest.raises(UsageError, match="belongs to another query"):
        setup.write(of_query("b", 4), numbered(10, 10))
    assert setup.write(of_query("a", 4), numbered(10, 10)) == Committed(10, 0)


def test_other_rows_under_a_complete_batch_are_refused(setup: SinkSetup) -> None:
    setup.write(RUN, numbered(0, 20))
    with pytest.raises(UsageError, match=r"20 rows.* 21"):
        setup.write(RUN, numbered(0, 21))
    assert setup.write(SinkBatch("daily", 1, named=True), numbered(20, 1)) == Committed(1, 0)


def test_a_write_with_a_lower_batch_is_refused(setup: SinkSetup) -> None:
    """Nobody could tell a late batch from one that is repeated."""
    setup.write(SinkBatch("daily", 5, named=True), numbered(0, 20))
    with pytest.raises(UsageError, match="ascend"):
        setup.write(SinkBatch("daily", 4, named=True), numbered(0, 20))


def test_a_query_with_a_new_checkpoint_needs_a_new_sink_id(setup: SinkSetup) -> None:
    for batch in (0, 1):
        run = SinkBatch("q", batch, named=True, streaming=True)
        setup.write(run, numbered(batch * 10, 10))
    with pytest.raises(UsageError, match="new checkpoint"):
        setup.write(SinkBatch("q", 0, named=True, streaming=True), numbered(0, 10))


@pytest.mark.parametrize("name", ["", "/", "a/b", "-a", "a b", "x" * 129, "ü"])
def test_a_sink_id_is_a_plain_name(name: str) -> None:
    with pytest.raises(UsageError, match="sinkId"):
        check_sink_id(name)


def test_marks_are_read_as_they_are_written() -> None:
    position = Position(12, 0, 345)
    assert parse_mark(mark_prefix("a:b", 12, 0) + "345", "a:b") == position
    for run in (Run("0123abcd", "89abcdef"), Run("-", "89abcdef"), Run("-", "-")):
        mark = f"{mark_prefix('a:b', 12, 0)}345/{run}"
        assert parse_mark(mark, "a:b") == Position(12, 0, 345, run)
    texts = ["a:b/12/0", "a:b/12/0/x", "a:b/012/0/1", "a:b.c/1/2/3", "a:b/1/2/3/", "a:b/1/2/3/x.y"]
    for text in (*texts, "a:b/1/2/3/-.-/4", "", None):
        assert parse_mark(text, "a:b") is None


# ---- the catalog ----


def restored(setup: SinkSetup) -> SinkSetup:
    """The store after its catalog, with all notes, was lost and rebuilt from the objects."""
    with forebay.open(setup.data) as store:
        store.topic(TOPIC).upload()
    setup.close()
    for file in setup.data.glob("catalog*"):
        file.unlink()
    resources = StoreResources(setup.settings, setup.bench.clock)
    topic = parse_topic(TOPIC)
    restore_topic(resources.catalog, resources.store, resources.session, topic, RestoreChoices())
    resources.close()
    return SinkSetup(setup.data)


def test_after_a_restore_the_log_tells_which_query_and_rows_it_has(setup: SinkSetup) -> None:
    setup.write(of_query("a", 1), numbered(0, 10))
    interrupt(setup, of_query("a", 2), setup.stage(numbered(10, 10)), 4)
    setup = restored(setup)
    for batch, rows in ((2, numbered(30, 10)), (3, numbered(30, 10))):
        with pytest.raises(UsageError, match="the sinkId 'q' belongs to another query"):
            setup.write(of_query("b", batch), rows)
    with pytest.raises(UsageError, match="other rows or other partitions"):
        setup.write(of_query("a", 2), numbered(30, 10))
    with pytest.raises(UsageError, match="other rows or other partitions"):
        setup.write(of_query(None, 2), numbered(30, 10))
    assert setup.write(of_query("b", 2), numbered(10, 10)) == Committed(6, 4)
    assert setup.write(of_query("b", 3), numbered(20, 10)) == Committed(10, 0)
    assert setup.values() == [f"{at:06d}" for at in range(30)]
    setup.close()


def test_after_a_restore_marks_of_an_earlier_release_are_found(setup: SinkSetup) -> None:
    with forebay.open(setup.data) as store:
        marks = [{MARK: f"q/2/0/{at}"} for at in range(4)]
        store.topic(TOPIC).append_many([b"%06d" % at for at in range(4)], marks)
    setup = restored(setup)
    assert setup.write(of_query("a", 2), numbered(0, 10)) == Committed(6, 4)
    assert setup.write(of_query("a", 3), numbered(10, 10)) == Committed(10, 0)
    assert setup.values() == [f"{at:06d}" for at in range(20)]
    setup.close()


def test_after_a_restore_the_log_tells_what_is_there(setup: SinkSetup) -> None:
    for batch in (0, 1):
        setup.write(SinkBatch("q", batch, named=True, streaming=True), numbered(batch * 10, 10))
    parts = setup.stage(numbered(20, 10))
    interrupt(setup, SinkBatch("q", 2, named=True, streaming=True), parts, 4)
    setup = restored(setup)
    with pytest.raises(UsageError, match="at batch 2"):
        setup.write(SinkBatch("q", 1, named=True, streaming=True), numbered(10, 10))
    assert setup.commit(SinkBatch("q", 2, named=True, streaming=True), parts) == Committed(6, 4)
    assert setup.write(
        SinkBatch("q", 3, named=True, streaming=True), numbered(30, 10)
    ) == Committed(10, 0)
    assert setup.write(
        SinkBatch("new", 0, named=True, streaming=True), numbered(40, 10)
    ) == Committed(10, 0)
    assert setup.values() == [f"{at:06d}" for at in range(50)]
    setup.close()


def test_the_note_says_what_is_complete(setup: SinkSetup) -> None:
    setup.write(SinkBatch("q", 7, named=True), numbered(0, 10))
    data = read_job_state(setup.bench.catalog, parse_topic(TOPIC), state_name("q"))
    assert data is not None
    note = decode_state(data, "it")
    assert (note.batch, note.done, note.offset, note.rows) == (7, True, 10, 10)
    plain = SinkState(
        7, done=True, offset=10, rows=10, shape="s", write="w", origin="here", previous=6
    )
    assert encode_state(plain) == (
        b'{"batch":7,"checksum":null,"digest":null,"done":true,"offset":10,"origin":"here",'
        b'"previous":6,"query":null,"rows":10,"shape":"s","write":"w"}'
    )
    for bad in (b"", b"{}", data.replace(b'"batch":7', b'"batch":-7')):
        with pytest.raises(ForebayError, match="it is not the state"):
            decode_state(bad, "it")


# ---- the owner ----


def test_a_topic_of_another_process_is_named_with_its_owner(setup: SinkSetup) -> None:
    code = (
        "import forebay, sys; store = forebay.open(sys.argv[1]);"
        "store.topic('orders').append(b'mine', durability='synced');"
        "print(store._factory.resources.session.name, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(setup.data)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        owner = other.stdout.readline().strip()
        parts = setup.stage(numbered(0, 5))
        with pytest.raises(TopicOwned) as caught:
            setup.commit(RUN, parts)
        assert owner in str(caught.value)
        assert "close the topic there, and write again" in str(caught.value)
        other.communicate("")
    assert setup.commit(RUN, parts) == Committed(5, 0)
    assert setup.values() == ["mine", *(f"{at:06d}" for at in range(5))]


def test_a_local_writer_makes_this_process_the_owner(setup: SinkSetup) -> None:
    topic = parse_topic(TOPIC)
    with LocalTopicWriter(setup.settings) as writer:
        assert writer.end(topic) == 0
        owner = setup.bench.catalog.owner(topic)
        assert owner is not None
        assert str(os.getpid()) in owner.name
