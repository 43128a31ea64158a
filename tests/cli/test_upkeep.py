"""`forebay sweep` and `forebay restore`, on local disk and SQLite."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from forebay.limits import LOG_DISTANCE
from forebay.pipeline import restore
from forebay.settings import MetadataSettings
from forebay.topic.store import Store
from support.cli_runs import done, facts, lose_local_log, make_tiered, refused, run, small_segments


@pytest.fixture
def data(tmp_path: Path) -> Path:
    data = tmp_path / "data"
    make_tiered(data)
    return data


@pytest.fixture
def objects(data: Path) -> Path:
    return data / "objects" / "storage" / "topics" / "default" / "orders" / "objects"


def forget_catalog(data: Path) -> None:
    for path in data.glob("catalog.db*"):
        path.unlink()


# ---- sweep ------------------------------------------------------------------------------------


def test_sweep_removes_what_no_descriptor_names(data: Path, objects: Path) -> None:
    orphan = objects / "data-5-14.dnb1"
    orphan.write_bytes(bytes(100))
    kept = facts("sweep", "--data", data)
    assert (kept["counts"]["kept"], kept["committed"], kept["errors"]) == (1, 3, 0)
    assert kept["items"][0]["topic"] == "/default/orders"
    would = done("sweep", "orders", "--data", data, "--grace", "0m", "--dry-run")
    assert "would be removed: " in would
    assert orphan.exists()
    said = done("sweep", "orders", "--data", data, "--grace", "0")
    assert said.splitlines()[-1] == (
        f"1 topics, 3 committed objects ({kept['committed_bytes']} bytes); 1 removed (100 bytes)"
    )
    assert not orphan.exists()
    assert "nothing to remove" in done("sweep", "--data", data, "--grace", "0s")


def test_sweep_ends_with_1_when_an_object_is_missing(data: Path, objects: Path) -> None:
    (objects / "data-20-39.dnb1").unlink()
    text = done("sweep", "--data", data, code=1)
    assert "missing object: offsets 20 to 39 are lost" in text
    assert "1 errors" in text
    assert facts("sweep", "--data", data, code=1)["errors"] == 1


def test_sweep_refuses_bad_input(data: Path, tmp_path: Path) -> None:
    for grace in ("soon", "-5m", "8MiB"):
        assert "must be a duration" in refused("sweep", "--data", data, f"--grace={grace}")
    assert "a topic is /namespace/topic" in refused("sweep", "a/b", "--data", data)
    assert "there is no catalog at" in refused("sweep", "--data", tmp_path / "absent")
    assert not (tmp_path / "absent").exists()
    said = refused("sweep", "orders", "ordres", "--data", data, "--dry-run")
    assert "neither the catalog" in said
    assert "knows /default/ordres" in said


def test_sweep_takes_a_topic_that_the_object_store_alone_knows(data: Path) -> None:
    forget_catalog(data)
    with Store(small_segments(data)) as store:
        store.topic("others")
    assert "unknown to the catalog: restore first" in done("sweep", "orders", "--data", data)


# ---- restore ----------------------------------------------------------------------------------


def test_restore_rebuilds_the_catalog_from_the_objects(data: Path) -> None:
    lose_local_log(data)
    forget_catalog(data)
    dry = facts("restore", "orders", "--data", data, "--dry-run", "--assume-nothing-lost")
    assert (dry["adopted"], dry["messages"], dry["error"]) == (3, 60, None)
    assert not list(data.glob("catalog.db*")), "a dry run makes no catalog"
    text = done("restore", "--all", "--data", data, "--verify", "--assume-nothing-lost")
    assert "/default/orders: adopted 3 objects with 60 messages, 0 were known; " in text
    assert "offsets 0 to 59, the next one is 60" in text
    assert "3 objects read in full" in text
    assert done("consume", "orders", "--data", data) == "".join(f"{n}\n" for n in range(60))
    assert facts("describe", "orders", "--data", data)["verified"] == 60
    again = facts("restore", "orders", "--data", data)
    assert (again["adopted"], again["known"]) == (0, 3)


def test_restore_says_which_offsets_may_be_lost(data: Path) -> None:
    lose_local_log(data)
    forget_catalog(data)
    text = done("restore", "orders", "--data", data)
    assert f"offsets 60 to {60 + LOG_DISTANCE - 1} may never have been used" in text


def test_what_was_reserved_stays_reserved_and_the_user_is_told(data: Path) -> None:
    lose_local_log(data)
    forget_catalog(data)
    plain = facts("restore", "orders", "--data", data)
    assert (plain["tail"], plain["assumed_in_vain"]) == (60, False)
    text = done("restore", "orders", "--data", data, "--assume-nothing-lost")
    assert "  --assume-nothing-lost had no effect" in text
    again = facts("restore", "orders", "--data", data, "--assume-nothing-lost")
    assert (again["next_offset"], again["assumed_in_vain"]) == (plain["next_offset"], True)
    said = facts("restore", "orders", "--data", data, "--next-offset", "100")
    assert (said["next_offset"], said["unknown"]) == (100, [60, 100])
    with Store(small_segments(data)) as store:
        assert store.topic("orders").append(b"next") == 100


def test_a_topic_without_objects_has_no_offsets_to_name(data: Path) -> None:
    with Store(small_segments(data)) as store:
        store.topic("empty")
    text = done("restore", "empty", "--data", data)
    assert text.startswith("/default/empty: adopted 0 objects with 0 messages, 0 were known; no of")
    assert "-1" not in text


def test_a_gap_is_refused_unless_it_is_allowed(data: Path, objects: Path) -> None:
    lose_local_log(data)
    forget_catalog(data)
    (objects / "data-20-39.dnb1").unlink()
    result = run("restore", "orders", "--data", data, "--json")
    assert result.exit_code == 1
    assert "holds the offsets 20 to 39" in json.loads(result.stdout)["error"]
    assert "holds the offsets 20 to 39" in result.stderr
    text = done("restore", "orders", "--data", data, "--allow-gaps", "--assume-nothing-lost")
    assert "  lost: no object holds offsets 20 to 39" in text
    assert "offsets 20 to 39 are lost" in refused_consume(data)


def refused_consume(data: Path) -> str:
    result = run("consume", "orders", "--data", data)
    assert result.exit_code == 2
    return result.stderr


def test_damage_is_told_and_ends_with_1(data: Path, objects: Path) -> None:
    lose_local_log(data)
    forget_catalog(data)
    whole = (objects / "data-20-39.dnb1").read_bytes()
    (objects / "data-20-39-1.dnb1").write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    (objects / "data-20-39.dnb1.json").unlink()
    text = done("restore", "orders", "--data", data, "--verify", code=1)
    assert "  damaged: data-20-39-1.dnb1" in text
    assert "adopted 3 objects" in text


def test_one_bad_topic_does_not_keep_the_others_from_being_restored(data: Path) -> None:
    lose_local_log(data)
    forget_catalog(data)
    result = run("restore", "absent", "orders", "--data", data, "--json")
    assert result.exit_code == 1
    first, second = map(json.loads, result.stdout.splitlines())
    assert "has no objects of /default/absent" in first["error"]
    assert (second["topic"], second["adopted"]) == ("/default/orders", 3)


# ---- losses, one after the other --------------------------------------------------------------


def test_offsets_beyond_every_reservation_are_not_given_again(tmp_path: Path) -> None:
    """Ten are uploaded; the log runs on for more than one reservation, and is lost."""
    data = tmp_path / "data"
    settings = replace(small_segments(data), metadata=MetadataSettings(offsets_reserved=20))
    with Store(settings) as store:
        topic = store.topic("orders")
        topic.append_many([b"x"] * 10)
        topic.upload()
        used = topic.append_many([b"y"] * 50, durability="synced")
    lose_local_log(data)
    forget_catalog(data)
    assert restore(settings, everything=True, runner="threads").ok
    with Store(settings) as store:
        assert store.topic("orders").append(b"z", durability="synced") >= used.stop


def test_after_a_damaged_last_object_the_topic_opens_appends_and_uploads(
    data: Path, objects: Path
) -> None:
    lose_local_log(data)
    forget_catalog(data)
    (objects / "data-40-59.dnb1").write_bytes(b"?")
    result = run("restore", "orders", "--data", data)
    assert "no undamaged object holds the offsets 40 to 59" in result.stderr
    text = done("restore", "orders", "--data", data, "--allow-gaps", code=1)
    assert "  damaged: data-40-59.dnb1" in text
    assert "  lost: no object holds offsets 40 to 59" in text
    with Store(small_segments(data)) as store:
        topic = store.topic("orders")
        first = topic.append(b"on", durability="synced")
        assert first >= 60
        topic.upload()
        assert [message.payload for message in topic.read(first)] == [b"on"]
    assert (objects / "data-40-59.dnb1").exists()
    assert "1 removed" in done("sweep", "--data", data, "--grace", "0")


def test_a_hole_and_then_a_lost_catalog_leave_a_topic_that_opens(data: Path) -> None:
    """The local log begins after the hole, and only the lost catalog knew that."""
    lose_local_log(data)
    with Store(small_segments(data)) as store:
        first = store.topic("orders").append(b"kept", durability="synced")
    assert first >= 100
    forget_catalog(data)
    result = run("restore", "orders", "--data", data)
    assert f"60 to {first - 1}" in result.stderr
    assert "--allow-gaps" in result.stderr
    done("restore", "orders", "--data", data, "--allow-gaps")
    with Store(small_segments(data)) as store:
        topic = store.topic("orders")
        assert topic.append(b"next", durability="synced") == first + 1
        assert [message.payload for message in topic.read(first)] == [b"kept", b"next"]
        topic.upload()


def test_an_older_catalog_is_brought_up_to_date_and_a_sweep_before_deletes_nothing(
    data: Path, objects: Path, tmp_path: Path
) -> None:
    shutil.copytree(data, tmp_path / "older", ignore=shutil.ignore_patterns("objects", "wal"))
    with Store(small_segments(data)) as store:
        topic = store.topic("orders")
        topic.upload()
        last = topic.append(b"last", durability="synced")
    forget_catalog(data)
    for path in (tmp_path / "older").glob("catalog.db*"):
        shutil.copy(path, data)
    before = sorted(objects.iterdir())
    text = done("sweep", "--data", data, "--grace", "0", code=1)
    assert "object newer than the catalog: the catalog is an older copy: run `forebay re" in text
    assert sorted(objects.iterdir()) == before
    assert "  the catalog was an older copy: " in done("restore", "orders", "--data", data)
    with Store(small_segments(data)) as store:
        topic = store.topic("orders")
        assert topic.append(b"next", durability="synced") == last + 1
        assert len(list(topic.read(0))) == last + 2


def test_a_topic_with_a_living_owner_is_not_restored(data: Path, objects: Path) -> None:
    with Store(small_segments(data)) as store:
        store.topic("orders")
        (objects / "data-60-79.dnb1").write_bytes(b"what the catalog does not know")
        result = run("restore", "orders", "--data", data)
        assert result.exit_code == 1, result.output
        assert "/default/orders is owned by " in result.stderr


def test_restore_refuses_bad_input(data: Path, tmp_path: Path) -> None:
    assert "name the topics to restore, or give --all" in refused("restore", "--data", data)
    assert "not both" in refused("restore", "orders", "--all", "--data", data)
    assert "exactly one" in refused("restore", "--all", "--data", data, "--next-offset", "5")
    both = ("--next-offset", "100", "--assume-nothing-lost")
    assert "either the next offset" in refused("restore", "orders", "--data", data, *both)
    early = run("restore", "orders", "--data", data, "--next-offset", "59")
    assert (early.exit_code, "cannot be 59" in early.stderr) == (1, True)
    assert "there are no objects" in refused("restore", "--all", "--data", tmp_path / "absent")
    assert not (tmp_path / "absent").exists()


def test_progress_goes_to_a_terminal_and_nowhere_else(data: Path) -> None:
    lose_local_log(data)
    forget_catalog(data)
    command = [sys.executable, "-m", "forebay", "restore", "--all", "--data", str(data)]
    master, slave = pty.openpty()
    try:
        shown = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, stderr=slave, text=True, timeout=120
        )
        os.set_blocking(master, False)
        bar = os.read(master, 65536)
    finally:
        os.close(slave)
        os.close(master)
    assert b"/default/orders" in bar
    assert shown.stdout.startswith("/default/orders: adopted 3 objects")
    quiet = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    assert quiet.stderr == ""
