"""`forebay compact` as a user runs it; the part that runs on Spark is in test_compact_spark.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.cli_runs import done, facts, refused
from support.compactions import Setup


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[Setup]:
    setup = Setup(tmp_path / "data")
    setup.lay([0, 10, 20, 30])
    yield setup
    setup.close()


def test_a_dry_run_says_what_would_be_done_and_does_nothing(setup: Setup, tmp_path: Path) -> None:
    said = done("compact", "--data", tmp_path / "data", "--dry-run").splitlines()
    assert said[0].startswith("/default/orders: 3 objects into data-0-29.dnb1 (offsets 0 to 29, ")
    assert said[1].startswith("3 objects would be compacted into 1 (")
    assert len(setup.chain()) == 3


def test_a_target_and_a_budget_are_sizes(setup: Setup, tmp_path: Path) -> None:
    data = tmp_path / "data"
    assert facts("compact", "--data", data, "--dry-run", "--target", "1KiB")["rows"] == []
    left = facts("compact", "--data", data, "--dry-run", "--budget", "2KiB")
    assert (left["rows"], left["left_groups"], left["ok"]) == ([], 1, True)
    size = sum(each.size for each in setup.chain())
    said = done("compact", "--data", data, "--dry-run", "--budget", "1")
    assert f"over the budget: 1 more objects to make ({size} bytes)" in said


def test_undo(setup: Setup, tmp_path: Path) -> None:
    data = tmp_path / "data"
    setup.compacted()
    said = done("compact", "orders", "--undo", "--data", data, "--dry-run")
    assert said.splitlines()[-1] == "1 compactions would be undone, 0 errors"
    said = done("compact", "orders", "--undo", "--object", "data-0-29.dnb1", "--data", data)
    assert said.startswith("/default/orders: data-0-29.dnb1 back into 3 objects (offsets 0 to 29, ")
    assert len(setup.chain()) == 3
    setup.compacted()
    setup.swept()
    name = setup.chain()[0].object_id
    failed = facts("compact", "orders", "--undo", "--object", name, "--data", data, code=1)
    assert "cannot be undone" in failed["rows"][0]["error"]
    assert done("compact", "orders", "--undo", "--data", data) == "0 compactions undone, 0 errors\n"


def test_what_cannot_be_meant_is_refused_in_one_line(setup: Setup, tmp_path: Path) -> None:
    data = tmp_path / "data"
    assert setup.chain()
    assert "--undo needs exactly one topic" in refused("compact", "--undo", "--data", data)
    assert "--object needs --undo" in refused("compact", "--object", "a", "--data", data)
    assert "--undo" in refused("compact", "orders", "--undo", "--target", "1", "--data", data)
    for option in ("--target", "--budget"):
        assert f"{option} is 'much'" in refused("compact", option, "much", "--data", data)
    assert "does not know the topic" in refused("compact", "other", "--data", data)
    assert "there is no catalog" in refused("compact", "--data", tmp_path / "elsewhere")
