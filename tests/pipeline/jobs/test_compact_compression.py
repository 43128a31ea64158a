"""Compactions that compress history, or decompress it: the frames stay the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.errors import UsageError
from forebay.format.descriptor import ObjectDescriptor, decode_descriptor
from forebay.format.names import object_key, sidecar
from forebay.pipeline.jobs.compact import compact, undo_compaction
from support.cli_runs import done, refused
from support.compactions import TOPIC, Setup

LARGE = 10**6
"""A target at which all objects of these tests are small."""
SMALL = 100
"""A target at which none is."""


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[Setup]:
    setup = Setup(tmp_path / "data")
    yield setup
    setup.close()


def frames(setup: Setup, start: int, end: int) -> bytes:
    with setup.reader() as reader:
        return b"".join(bytes(found.raw) for found in reader.frames(start, end - 1))


def codecs(chain: list[ObjectDescriptor]) -> list[str | None]:
    return [each.codec for each in chain]


def test_objects_that_need_no_merging_are_compressed_one_by_one(setup: Setup) -> None:
    setup.lay([0, 200, 400, 600])
    before = frames(setup, 0, 600)
    report = setup.compacted(SMALL, compression="zstd")
    assert report.ok
    assert [row.replaced for row in report.rows] == [1, 1, 1]
    assert all(row.sha256_before == row.sha256_after for row in report.rows)
    chain = setup.chain()
    assert codecs(chain) == ["zstd"] * 3
    assert chain[0].object_id == "data-0-199.dnb1.zst"
    assert sum(each.logical_size for each in chain) == len(before) == report.bytes
    assert (report.stored_before, report.stored_after) == (
        len(before), sum(each.size for each in chain),
    )  # fmt: skip
    assert report.stored_after < report.stored_before / 2
    assert frames(setup, 0, 600) == before
    key = object_key(TOPIC, sidecar(chain[1].object_id))
    assert decode_descriptor(bytes(setup.store.get_object(key, 10**6))) == chain[1]
    assert setup.compacted(SMALL, compression="zstd").rows == ()


def test_small_objects_are_merged_and_compressed_at_once(setup: Setup) -> None:
    setup.lay(range(0, 1001, 100))
    before = frames(setup, 0, 1000)
    report = setup.compacted(LARGE, compression="zstd")
    [large] = setup.chain()
    assert (report.ok, report.replaced) == (True, 10)
    assert (large.object_id, large.logical_size) == ("data-0-999.dnb1.zst", len(before))
    assert frames(setup, 0, 1000) == before
    assert frames(setup, 950, 960) in before


def test_compressed_history_can_be_decompressed_again(setup: Setup) -> None:
    setup.lay([0, 200, 400])
    before = frames(setup, 0, 400)
    setup.compacted(SMALL, compression="zstd")
    setup.compacted(SMALL, compression="none")
    chain = setup.chain()
    assert codecs(chain) == [None, None]
    assert frames(setup, 0, 400) == before
    # The plain names are taken by the objects that were replaced first.
    assert [each.object_id for each in chain] == ["data-0-199-1.dnb1", "data-200-399-1.dnb1"]


def test_without_the_option_only_merged_objects_follow_the_setting(tmp_path: Path) -> None:
    setup = Setup(tmp_path / "data", compression="zstd")
    try:
        made = setup.lay([0, 1000, 1010, 1020, 1030])
        target = made[0].size + 1
        setup.compacted(target)
        assert codecs(setup.chain()) == [None, "zstd"]
        assert setup.ranges() == [(0, 999), (1000, 1029)]
        setup.require_readable(1030)
    finally:
        setup.close()


def test_the_target_counts_bytes_before_compression(setup: Setup) -> None:
    setup.lay([0, 200, 400, 600, 800])
    setup.compacted(SMALL, compression="zstd")
    chain = setup.chain()
    two = chain[0].logical_size + chain[1].logical_size
    assert sum(each.size for each in chain) < two
    setup.compacted(2 * chain[-1].logical_size + 50, compression="zstd")
    assert setup.ranges() == [(0, 399), (400, 799)]


def test_a_compression_can_be_undone_until_a_sweep(setup: Setup) -> None:
    made = setup.lay([0, 200, 400])
    setup.compacted(SMALL, compression="zstd")
    report = undo_compaction(setup.settings, str(TOPIC))
    assert (report.ok, report.objects) == (True, 2)
    assert [each.object_id for each in setup.chain()] == [each.object_id for each in made]
    setup.require_readable(400)


def test_a_sweep_removes_the_uncompressed_objects(setup: Setup) -> None:
    setup.lay([0, 200, 400])
    setup.compacted(SMALL, compression="zstd")
    setup.swept()
    assert [name for name in setup.names() if not name.endswith(".json")] == [
        "data-0-199.dnb1.zst",
        "data-200-399.dnb1.zst",
    ]
    setup.require_readable(400)


def test_the_command_compresses_and_says_what_it_saved(setup: Setup) -> None:
    setup.lay([0, 200, 400])
    data = str(setup.settings.data)
    said = done("compact", "--compression", "zstd", "--target", "100", "--dry-run", "--data", data)
    assert "data-0-199.dnb1.zst" in said
    undo = ("compact", "orders", "--undo", "--compression", "zstd", "--data", data)
    assert "--compression" in refused(*undo)
    with pytest.raises(UsageError, match="'none' or 'zstd'"):
        compact(setup.settings, compression="lz4")  # type: ignore[arg-type]
