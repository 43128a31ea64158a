"""`forebay accept-loss`: what it says and changes, with and without a running server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.cli_runs import done, facts, refused, run
from support.holed_topics import END, HELD, ORDERS, leave_a_wide_hole, record_of
from support.scan_stores import settings_of
from support.served import served


@pytest.fixture
def data(tmp_path: Path) -> Path:
    leave_a_wide_hole(tmp_path / "data")
    return tmp_path / "data"


def consumed(data: Path, *more: str) -> list[int]:
    lines = done("consume", "orders", "--data", data, "--json", *more).splitlines()
    return [json.loads(line)["offset"] for line in lines]


BOTH_SIDES = [*range(HELD), *range(END, END + HELD)]


def test_all_readers_jump_after_it(data: Path) -> None:
    result = run("consume", "orders", "--data", data)
    assert result.exit_code == 2
    assert f"`forebay accept-loss {ORDERS}`" in result.stderr
    before = record_of(data)
    text = done("accept-loss", "orders", "--data", data)
    assert [line.split(":")[0] for line in text.splitlines()] == [ORDERS] * len(
        [*before.lost, *before.unknown]
    )
    assert f"to {END - 1}, which may never have been used" in text
    assert consumed(data) == BOTH_SIDES
    assert consumed(data, "--start", str(HELD + 5), "--limit", "3") == [END, END + 1, END + 2]
    assert consumed(data, "--start", "8", "--limit", "4") == [8, 9, END, END + 1]
    assert done("accept-loss", "orders", "--data", data) == f"{ORDERS}: nothing to accept\n"


def test_a_dry_run_says_what_would_be_accepted(data: Path) -> None:
    before = record_of(data)
    said = facts("accept-loss", "orders", "--data", data, "--dry-run")
    assert said["dry_run"] is True
    assert said["accepted"] == [[HELD, END]]
    text = done("accept-loss", "orders", "--data", data, "--dry-run")
    assert "would accept offsets" in text
    assert record_of(data) == before


def test_a_part_is_accepted(data: Path) -> None:
    said = facts("accept-loss", "orders", "--data", data, "--from", "12", "--to", "20")
    assert said["accepted"] == [[12, 20]]
    assert record_of(data).accepted == ((12, 20),)


def test_one_wrong_name_changes_nothing(data: Path) -> None:
    before = record_of(data)
    said = refused("accept-loss", "orders", "absent", "--data", data)
    assert "there is no topic /default/absent" in said
    assert record_of(data) == before


@pytest.mark.parametrize("named", [True, False])
def test_a_running_server_is_asked_and_needs_no_restart(data: Path, named: bool) -> None:
    with served(settings_of(data)) as server:
        server.store.topic(ORDERS)
        url = ["--url", server.url] if named else []
        result = run("consume", "orders", "--data", data, "--url", server.url)
        assert result.exit_code == 2
        assert f"`forebay accept-loss {ORDERS}`" in result.stderr
        assert "--skip-lost" in result.stderr
        done("accept-loss", "orders", "--data", data, *url)
        assert consumed(data, "--url", server.url) == BOTH_SIDES
        limited = consumed(data, "--url", server.url, "--follow", "--start", "8", "--limit", "4")
        assert limited == [8, 9, END, END + 1]
        assert "there is no topic" in refused("accept-loss", "absent", "--data", data, *url)


def test_describe_and_explain_tell_the_kinds_apart(data: Path) -> None:
    record = record_of(data)
    (first, end), *_ = record.unknown
    text = done("describe", "orders", "--data", data)
    assert f"  unknown    {first} to {end - 1}, may never have been used\n" in text
    assert f"`forebay accept-loss {ORDERS}`" in text
    told = done("explain", "orders", str(first), "--data", data)
    assert told.startswith(f"{ORDERS}, offset {first}: unknown\n")
    assert f"`forebay accept-loss {ORDERS}`" in told
    done("accept-loss", "orders", "--data", data)
    text = done("describe", "orders", "--data", data)
    assert f"  accepted   {HELD} to {END - 1}\n" in text
    assert "accept-loss" not in text
    assert f"except {END - HELD} offsets without messages" in text
    told = done("explain", "orders", str(first), "--data", data)
    assert "readers jump over it" in told
    assert f"the next offset that can be read is {END}" in told
