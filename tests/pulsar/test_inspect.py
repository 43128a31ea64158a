"""What `forebay inspect` shows of the objects of a ledger."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forebay.format.pulsar.entry import (
    BrokerEntryMetadata,
    Compression,
    EncryptionKey,
    MessageMetadata,
    encode_entry,
)
from forebay.inspect import inspect
from forebay.limits import LEDGER_BLOCK_BYTES_MIN
from support.cli_runs import run
from support.ledgers import REAL_DATA, REAL_INDEX, packed


def looked(path: Path, data: bytes, limit: int | None = None) -> list[dict[str, Any]]:
    path.write_bytes(data)
    found = list(inspect(path, limit=limit))
    json.dumps(found)
    return found


def entry(number: int, size: int = 10, **fields: Any) -> bytes:
    metadata = MessageMetadata(f"producer-{number}", number, 1_700_000_000_000 + number, **fields)
    return encode_entry(metadata, b"x" * size)


def test_a_real_ledger_is_shown_entry_by_entry(tmp_path: Path) -> None:
    block, found, summary = looked(tmp_path / "ledger-1", REAL_DATA)
    assert block == {"type": "Block", "first_entry_id": 0, "position": 0, "bytes": 205}
    assert found == {
        "type": "Entry",
        "entry_id": 0,
        "position": 128,
        "entry_bytes": 65,
        "checksum": "2f8effbc",
        "producer": "standalone-9-0",
        "sequence_id": 0,
        "publish_time": 1632298359277,
        "payload_bytes": found["payload_bytes"],
        "batch_messages": 1,
        "payload": found["payload"],
    }
    assert found["payload"].endswith("hello-reader-1")
    assert summary == {
        "type": "LedgerData",
        "blocks": 1,
        "entries": 1,
        "bytes": 205,
        "entry_bytes": 65,
        "valid_bytes": 205,
        "bad_entries": 0,
        "end": "complete",
        "damaged": False,
        "next_entry_id": 1,
    }


def test_a_real_index_names_its_topic_and_its_blocks(tmp_path: Path) -> None:
    (found,) = looked(tmp_path / "ledger-1-index", REAL_INDEX)
    assert found["type"] == "LedgerIndex"
    assert (found["data_bytes"], found["entries"], found["state"]) == (205, 1, "CLOSED")
    assert found["blocks"] == [{"first_entry_id": 0, "part": 1, "position": 0}]
    named = found["custom_metadata"]["pulsar/managed-ledger"]
    assert named == "public/default/persistent/read-test"


def test_entries_of_several_blocks_are_shown_up_to_the_limit_and_all_are_counted(
    tmp_path: Path,
) -> None:
    data, packer = packed((entry(at, 400) for at in range(20)), LEDGER_BLOCK_BYTES_MIN)
    assert len(packer.blocks) > 1
    *shown, summary = looked(tmp_path / "x", data)
    blocks = [each for each in shown if each["type"] == "Block"]
    assert [(each["first_entry_id"], each["position"]) for each in blocks] == [
        (each.first_entry_id, each.position) for each in packer.blocks
    ]
    assert [each["entry_id"] for each in shown if each["type"] == "Entry"] == list(range(20))
    assert (summary["blocks"], summary["entries"]) == (len(blocks), 20)
    *fewer, same = looked(tmp_path / "x", data, limit=2)
    assert same == summary
    assert [each["entry_id"] for each in fewer if each["type"] == "Entry"] == [0, 1]
    assert looked(tmp_path / "x", data, limit=0) == [summary]


def test_what_an_entry_says_of_itself_is_shown(tmp_path: Path) -> None:
    metadata = MessageMetadata(
        "p",
        7,
        8,
        properties=(("k", "v" * 1000), *((f"k{at}", "") for at in range(100))),
        partition_key="key",
        compression=Compression.ZSTD,
        uncompressed_size=99,
        event_time=5,
        marker_type=21,
        chunks=2,
        chunk_id=0,
        encryption_keys=(EncryptionKey("secret-name", b"\0"),),
    )
    made = encode_entry(metadata, b"\xff" * 100, BrokerEntryMetadata(3, 4))
    _, found, _ = looked(tmp_path / "x", packed([made], 4096)[0])
    assert found["compression"] == "ZSTD"
    assert (found["broker_timestamp"], found["index"]) == (3, 4)
    assert (found["chunk_id"], found["chunks"], found["marker_type"]) == (0, 2, 21)
    assert found["encryption_keys"] == ["secret-name"]
    assert len(found["properties"]) == 20
    assert found["properties"]["k"] == "v" * 256
    assert found["payload"] == "\\xff" * 64
    assert found["payload_bytes"] == 100


def test_a_flipped_bit_in_an_entry_is_named_and_the_others_are_shown(tmp_path: Path) -> None:
    data, _ = packed((entry(at) for at in range(5)), LEDGER_BLOCK_BYTES_MIN)
    at = data.index(b"producer-2")
    data = data[:at] + b"P" + data[at + 1 :]
    *shown, summary = looked(tmp_path / "x", data)
    assert ["error" in each for each in shown[1:]] == [False, False, True, False, False]
    assert "checksum" in shown[3]["error"]
    assert (summary["bad_entries"], summary["damaged"], summary["end"]) == (1, True, "complete")
    *beyond, summary = looked(tmp_path / "x", data, limit=1)
    assert [each.get("entry_id") for each in beyond] == [None, 0, 2], "the bad one is shown too"


@pytest.mark.parametrize("cut", range(4, 205, 7))
def test_a_cut_off_object_shows_what_is_whole_and_says_where_it_ends(
    tmp_path: Path, cut: int
) -> None:
    *shown, summary = looked(tmp_path / "ledger-1", REAL_DATA[:cut])
    assert shown == []
    assert summary["damaged"]
    assert summary["end"].endswith(f", at {summary['valid_bytes']}")


def test_a_cut_off_index_and_pulsars_other_version_are_named_errors(tmp_path: Path) -> None:
    for data, told in (
        (REAL_INDEX[:40], "cut off or damaged"),
        (bytes.fromhex("3d1fb0bc") + bytes(60), "streaming offload"),
    ):
        path = tmp_path / "index"
        path.write_bytes(data)
        done = run("inspect", path)
        assert done.exit_code == 2
        assert told in done.stderr
        assert str(path) in done.stderr
        assert "Traceback" not in done.stderr


def test_a_streaming_data_object_is_damage_that_says_what_it_is(tmp_path: Path) -> None:
    (summary,) = looked(tmp_path / "x", bytes.fromhex("26a66d32") + bytes(200))
    assert "streaming offload" in summary["end"]


def test_the_command_prints_a_ledger_and_ends_with_one_for_damage(tmp_path: Path) -> None:
    path = tmp_path / "7f0e-ledger-1"
    path.write_bytes(REAL_DATA)
    done = run("inspect", path)
    assert done.exit_code == 0
    assert "Entry: entry_id=0, position=128" in done.stdout
    assert "LedgerData: blocks=1, entries=1" in done.stdout
    path.write_bytes(REAL_DATA[:-1] + b"!")
    assert run("inspect", path).exit_code == 1
