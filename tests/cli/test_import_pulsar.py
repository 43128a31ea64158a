"""`forebay import-pulsar`: a plan first, exact counts, and errors that say what to do."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from support import pulsar_entries as pulsar
from support.cli_runs import done, facts, refused
from support.pulsar_buckets import at, put_ledger

pytest.importorskip("pyarrow", reason="an import needs Arrow")

THREADS = ("--runner", "threads")


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    path = tmp_path / "bucket"
    with closing(at(path)) as store:
        entries = [pulsar.entry(b"order %d" % number) for number in range(4)]
        put_ledger(store, 7, entries)
        put_ledger(store, 9, [pulsar.marker(), *entries], folder="more/")
        encrypted = [pulsar.encrypted(b"?")]
        put_ledger(store, 8, encrypted, managed_ledger="public/default/persistent/secrets")
    return path


def test_a_plan_is_printed_and_apply_carries_it_out(bucket: Path, tmp_path: Path) -> None:
    where = (bucket, "--topic", "orders", "--data", tmp_path / "data", *THREADS)
    first = "persistent://public/default/orders into /default/orders: 8 messages to import; "
    assert done("import-pulsar", *where).splitlines() == [
        f"{first}2 ledgers, 0 of them imported before",
        "  among them, or left out: 1 marker",
        "1 topics: 8 messages to import, 0 with errors",
        "nothing was changed; --apply imports",
    ]
    assert not (tmp_path / "data").exists()
    report = facts("import-pulsar", *where, "--apply")
    assert (report["applied"], report["ok"], report["messages"]) == (True, True, 8)
    assert report["rows"][0]["marker"] == 1
    again = done("import-pulsar", *where, "--apply")
    assert "0 messages imported; 2 ledgers, 2 of them imported before" in again
    read = done("consume", "orders", "--data", tmp_path / "data")
    assert read.splitlines() == [f"order {number}" for _ in range(2) for number in range(4)]


def test_what_needs_a_decision_is_exit_code_1_and_says_which(bucket: Path, tmp_path: Path) -> None:
    where = (bucket, "--data", tmp_path / "data", "--apply", *THREADS)
    text = done("import-pulsar", *where, code=1)
    assert "1 messages are encrypted" in text
    assert "keep them with --keep encrypted, or leave them out with --leave-out encrypted" in text
    assert "2 topics: 8 messages imported, 1 with errors" in text
    assert done("import-pulsar", *where, "--leave-out", "encrypted")


def test_late_ledgers_are_exit_code_1_and_named(bucket: Path, tmp_path: Path) -> None:
    where = (bucket, "--topic", "orders", "--data", tmp_path / "data", "--apply", *THREADS)
    done("import-pulsar", *where)
    with closing(at(bucket)) as store:
        put_ledger(store, 3, [pulsar.entry(b"late")])
    text = done("import-pulsar", *where, code=1)
    assert "not imported: the ledgers 3 appeared after later ones were imported" in text


def test_a_configuration_file_may_name_the_bucket(bucket: Path, tmp_path: Path) -> None:
    config = tmp_path / "pulsar.yml"
    config.write_text(f"storage:\n  cloud: {{backend: fs, root: '{bucket}'}}\n")
    where = (config, "--topic", "orders", "--data", tmp_path / "data", *THREADS)
    assert facts("import-pulsar", *where)["messages"] == 8
    assert "already says where the bucket is" in refused(
        "import-pulsar", *where, "--store", "endpoint=http://x"
    )
    config.write_text("storage:\n  wal: {cache_capacity: 1}\n")
    assert "does not say where Pulsar's bucket is" in refused("import-pulsar", *where)


def test_bad_input_is_refused(bucket: Path, tmp_path: Path) -> None:
    data = ("--data", tmp_path / "data", *THREADS)
    assert "must be NAME=VALUE" in refused("import-pulsar", "s3://b", "--store", "endpoint", *data)
    assert "is not a directory" in refused("import-pulsar", tmp_path / "none", *data)
    assert "nearest is orders" in refused("import-pulsar", bucket, "--topic", "order", *data)
