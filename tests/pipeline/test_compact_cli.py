"""`forebay compact` as a user runs it; the part that runs on Spark is in test_compact_spark.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cli_runs import done, facts, refused
from compactions import Site


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path / "data")
    site.lay([0, 10, 20, 30])
    yield site
    site.close()


def test_a_dry_run_says_what_would_be_done_and_does_nothing(site: Site, tmp_path: Path) -> None:
    said = done("compact", "--data", tmp_path / "data", "--dry-run").splitlines()
    assert said[0].startswith("/default/orders: 3 objects into data-0-29.dnb1 (offsets 0 to 29, ")
    assert said[1].startswith("3 objects would be compacted into 1 (")
    assert len(site.chain()) == 3


def test_a_target_and_a_budget_are_sizes(site: Site, tmp_path: Path) -> None:
    data = tmp_path / "data"
    assert facts("compact", "--data", data, "--dry-run", "--target", "1KiB")["rows"] == []
    left = facts("compact", "--data", data, "--dry-run", "--budget", "2KiB")
    assert (left["rows"], left["left_groups"], left["ok"]) == ([], 1, True)
    size = sum(each.size for each in site.chain())
    said = done("compact", "--data", data, "--dry-run", "--budget", "1")
    assert f"over the budget: 1 more objects to make ({size} bytes)" in said


def test_undo(site: Site, tmp_path: Path) -> None:
    data = tmp_path / "data"
    site.compacted()
    said = done("compact", "orders", "--undo", "--data", data, "--dry-run")
    assert said.splitlines()[-1] == "1 compactions would be undone, 0 errors"
    said = done("compact", "orders", "--undo", "--object", "data-0-29.dnb1", "--data", data)
    assert said.startswith("/default/orders: data-0-29.dnb1 back into 3 objects (offsets 0 to 29, ")
    assert len(site.chain()) == 3
    site.compacted()
    site.swept()
    name = site.chain()[0].object_id
    failed = facts("compact", "orders", "--undo", "--object", name, "--data", data, code=1)
    assert "cannot be undone" in failed["rows"][0]["error"]
    assert done("compact", "orders", "--undo", "--data", data) == "0 compactions undone, 0 errors\n"


def test_what_cannot_be_meant_is_refused_in_one_line(site: Site, tmp_path: Path) -> None:
    data = tmp_path / "data"
    assert site.chain()
    assert "--undo needs exactly one topic" in refused("compact", "--undo", "--data", data)
    assert "--object needs --undo" in refused("compact", "--object", "a", "--data", data)
    assert "--undo" in refused("compact", "orders", "--undo", "--target", "1", "--data", data)
    for option in ("--target", "--budget"):
        assert f"{option} is 'much'" in refused("compact", option, "much", "--data", data)
    assert "does not know the topic" in refused("compact", "other", "--data", data)
    assert "there is no catalog" in refused("compact", "--data", tmp_path / "elsewhere")
