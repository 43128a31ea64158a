"""The command line over both tiers: consume, topics, describe, explain."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from forebay.topic.store import Store
from support.cli_runs import done, facts, lose_local_log, make_tiered, refused, run, small_segments


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


def lines(first: int, end: int) -> str:
    return "".join(f"{number}\n" for number in range(first, end))


def test_consume_reads_objects_and_then_local_files(data: Path) -> None:
    make_tiered(data)
    assert not (data / "wal" / "default" / "orders" / "wal.log").exists(), "retention was there"
    assert done("consume", "orders", "--data", data) == lines(0, 100)
    assert done("consume", "orders", "--data", data, "--start", "55", "--end", "65") == lines(
        55, 65
    )
    assert done("consume", "orders", "--data", data, "--end", "3", "--limit", "2") == lines(0, 2)
    assert done("consume", "orders", "--data", data, "--end", "0") == ""


def test_consume_reads_objects_alone_where_there_is_no_log(data: Path) -> None:
    make_tiered(data)
    lose_local_log(data)
    assert done("consume", "orders", "--data", data) == lines(0, 60)
    assert not (data / "wal").exists()


def test_lost_offsets_are_an_error_that_says_where_to_go_on(data: Path) -> None:
    make_tiered(data)
    lose_local_log(data)
    done("produce", "orders", "--data", data, stdin=lines(100, 105))
    result = run("consume", "orders", "--data", data)
    assert result.exit_code == 2
    assert result.stdout == lines(0, 60)
    assert "Accept this with `forebay accept-loss /default/orders`" in result.stderr
    assert "or continue at offset 100, or use --skip-lost" in result.stderr
    assert result.stderr.count("\n") == 1
    skipping = run("consume", "orders", "--data", data, "--skip-lost")
    assert skipping.exit_code == 0
    assert skipping.stdout == lines(0, 60) + lines(100, 105)
    assert skipping.stderr == "forebay: skipped offsets 60 to 99: lost\n"
    assert done("consume", "orders", "--data", data, "--start", "100") == lines(100, 105)
    short = run("consume", "orders", "--data", data, "--skip-lost", "--end", "80", "--start", "58")
    assert (short.exit_code, short.stdout) == (0, lines(58, 60))


def test_following_stops_at_its_end_and_goes_through_both_tiers(data: Path) -> None:
    make_tiered(data)
    command = [sys.executable, "-m", "forebay", "consume", "orders", "--data", str(data)]
    with (
        Store(small_segments(data)) as store,
        subprocess.Popen(
            [*command, "--follow", "--end", "102"], stdout=subprocess.PIPE, text=True
        ) as consumer,
    ):
        assert consumer.stdout is not None
        for number in range(100):
            assert consumer.stdout.readline() == f"{number}\n"
        topic = store.topic("orders")
        topic.append_many([b"100", b"101", b"102"], durability="synced")
        assert consumer.stdout.read() == lines(100, 102)
        assert consumer.wait(timeout=120) == 0


def test_a_bad_end_is_refused(data: Path) -> None:
    make_tiered(data)
    told = refused("consume", "orders", "--data", data, "--start", "10", "--end", "9")
    assert "--end 9 is before the start" in told
    assert run("consume", "orders", "--data", data, "--end", "-1").exit_code == 2


def test_topics_of_both_tiers_are_listed_and_none_is_opened(data: Path) -> None:
    make_tiered(data)
    lose_local_log(data)
    (data / "wal" / "default" / "local").mkdir(parents=True)
    before = sorted(data.rglob("*"))
    with Store(small_segments(data)) as store:
        store.topic("owned")
        assert done("topics", "--data", data) == "/default/local\n/default/orders\n/default/owned\n"
    assert set(before) <= set(data.rglob("*"))


def test_a_reading_command_makes_nothing(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert done("topics", "--data", empty) == ""
    assert "there is no topic /default/orders" in refused("consume", "orders", "--data", empty)
    assert "there is no topic" in refused("describe", "orders", "--data", empty)
    assert "there is no topic" in refused("explain", "orders", "0", "--data", empty)
    assert list(empty.iterdir()) == []


def test_produce_can_wait_for_the_upload(data: Path) -> None:
    said = done("produce", "t", "--data", data, "--durability", "uploaded", stdin="a\nb\n")
    assert said == "2 messages in /default/t, uploaded; next offset 2\n"
    assert facts("describe", "t", "--data", data)["uploaded"] == 2
    said = done("produce", "t", "--data", data, "--durability", "buffered", stdin="c\n")
    assert said == "1 message in /default/t, synced; next offset 3\n"
    assert run("produce", "t", "--data", data, "--durability", "eventually").exit_code == 2


def test_describe_shows_where_everything_is(data: Path) -> None:
    make_tiered(data)
    found = facts("describe", "orders", "--data", data)
    assert (found["start_offset"], found["synced"], found["uploaded"]) == (0, 100, 60)
    assert (found["verified"], found["lost"], found["owner"]) == (60, [], None)
    assert [each["start_offset"] for each in found["objects"]] == [0, 20, 40]
    assert sum(each["next_offset"] - each["start_offset"] for each in found["segments"]) == 40
    text = done("describe", "orders", "--data", data, "--limit", "2")
    assert "  uploaded   60\n" in text
    assert "3 objects, " in text
    assert ", 2 of them listed\n" in text
    assert "  older objects: --before 20\n" in text
    assert "data-40-59.dnb1" in text
    assert "data-0-19.dnb1" not in text
    assert "kept: it holds the newest message" in text
    older = done("describe", "orders", "--data", data, "--limit", "2", "--before", "20")
    assert "data-0-19.dnb1" in older
    assert "data-40-59.dnb1" not in older
    assert "older objects" not in older


def test_describe_names_the_owner_and_what_is_lost(data: Path) -> None:
    make_tiered(data)
    lose_local_log(data)
    text = done("describe", "orders", "--data", data)
    assert "  synced     unknown: its log is not on this machine\n" in text
    with Store(small_segments(data)) as store:
        store.topic("orders").append(b"100", durability="synced")
        found = facts("describe", "orders", "--data", data)
        assert found["lost"] == [[60, 100]]
        assert found["owner"]
        assert "  lost       60 to 99\n" in done("describe", "orders", "--data", data)


def test_describe_ends_with_1_when_the_chain_has_a_hole(data: Path) -> None:
    make_tiered(data)
    from forebay.catalog.catalog import Catalog
    from forebay.catalog.kv import Remove
    from forebay.catalog.sqlite import SqliteKv
    from forebay.format.names import parse_topic

    kv = SqliteKv(data / "catalog.db")
    kv.commit([], [Remove(Catalog(kv).keys.descriptor(parse_topic("orders"), 20))])
    kv.close()
    assert "problem: data-40-59.dnb1 does not begin at 20" in done(
        "describe", "orders", "--data", data, code=1
    )
    assert facts("explain", "orders", "25", "--data", data, code=1)["state"] == "missing"


def test_explain_says_where_an_offset_is(data: Path) -> None:
    make_tiered(data)
    found = facts("explain", "orders", "30", "--data", data)
    assert (found["state"], found["uploaded"], found["verified"]) == ("stored", True, True)
    (place,) = found["places"]
    assert place["tier"] == "object"
    stored = data / "objects" / place["name"]
    at = place["position"]
    assert stored.read_bytes()[at : at + 8] == (30).to_bytes(8, "little")
    text = done("explain", "orders", "99", "--data", data)
    assert "/default/orders, offset 99: stored\n  segment " in text
    assert "  uploaded: no\n" in text
    assert "  its segment may be deleted: no: it holds the newest message\n" in text
    assert "offset 100: not yet synced" in done("explain", "orders", "100", "--data", data)
    stored.unlink()
    assert "problem: " in done("explain", "orders", "30", "--data", data, code=1)


def test_explain_knows_what_is_lost(data: Path) -> None:
    make_tiered(data)
    lose_local_log(data)
    done("produce", "orders", "--data", data, stdin="x\n")
    text = done("explain", "orders", "70", "--data", data)
    first, advice, after = text.splitlines()
    assert first == "/default/orders, offset 70: lost"
    assert "`forebay accept-loss /default/orders`" in advice
    assert after == "  the next offset that can be read is 100"


@pytest.mark.parametrize("offset", ["x", "1.5", "9" * 40])
def test_explain_refuses_what_is_no_offset(data: Path, offset: str) -> None:
    make_tiered(data)
    assert "must be a whole number" in refused("explain", "orders", offset, "--data", data)


def test_what_inspect_says_of_objects_and_their_descriptors(data: Path) -> None:
    make_tiered(data)
    objects = data / "objects" / "storage" / "topics" / "default" / "orders" / "objects"
    *frames, summary = map(
        json.loads, done("inspect", objects / "data-20-39.dnb1", "--json").splitlines()
    )
    assert [frame["offset"] for frame in frames] == list(range(20, 40))
    assert summary["end"] == "complete"
    found = facts("inspect", objects / "data-20-39.dnb1.json")
    assert (found["type"], found["start_offset"], found["end_offset"]) == (
        "ObjectDescriptor",
        20,
        39,
    )
    assert found["offset_index_count"] == 1


def test_what_inspect_says_of_the_other_new_files(data: Path, tmp_path: Path) -> None:
    make_tiered(data)
    place = data / "wal" / "default" / "orders"
    assert len(facts("inspect", place / "wal.id")["log_id"]) == 32
    checkpoint = facts("inspect", place / "uploader.ckpt")
    assert checkpoint["last_object_id"] == "data-40-59.dnb1"
    assert checkpoint["active_start_offset"] is None
    topic, summary = map(json.loads, done("inspect", data / "catalog.db", "--json").splitlines())
    assert (topic["topic"], topic["tail"]) == ("/default/orders", 60)
    assert (summary["type"], summary["topics"]) == ("Catalog", 1)
    assert done("inspect", data / "catalog.db", "--limit", "0").startswith("Catalog: topics=1")


def test_inspect_leaves_the_database_of_another_program_alone(tmp_path: Path) -> None:
    import sqlite3

    path = tmp_path / "other.db"
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE t (x)")
    other.close()
    before = path.read_bytes()
    assert "a SQLite database of another program" in refused("inspect", path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    (tmp_path / "bad.json").write_text("{}")
    assert "is not the descriptor of an object" in refused("inspect", tmp_path / "bad.json")
    (tmp_path / "wal.id").write_text("no id")
    assert "wal.id does not hold the id" in refused("inspect", tmp_path / "wal.id")
