"""`forebay topics create` and `delete`, with and without a running server."""

from __future__ import annotations

from pathlib import Path

import pytest

from forebay.settings import StoreSettings, UploaderSettings
from forebay.topic.store import Store
from support.cli_runs import done, facts, make_tiered, refused, run, small_segments
from support.served import served


@pytest.fixture
def data(tmp_path: Path) -> Path:
    make_tiered(tmp_path / "data")
    return tmp_path / "data"


def test_a_topic_and_its_partitions_are_created_in_a_new_store(tmp_path: Path) -> None:
    where = ["--data", str(tmp_path / "new")]
    assert done("topics", "create", "a", *where) == "/default/a: created\n"
    assert done("topics", "create", "a", *where) == "/default/a: exists already\n"
    found = facts("topics", "create", "/shop/b", "--partitions", "2", *where)
    assert found == {
        "topic": "/shop/b",
        "created": True,
        "partitions": ["/shop/b-part-0", "/shop/b-part-1"],
    }
    assert done("topics", *where) == "/default/a\n/shop/b-part-0\n/shop/b-part-1\n"


def test_a_deleted_topic_is_gone_from_every_command(data: Path) -> None:
    said = done("topics", "delete", "orders", "--yes", "--data", data)
    assert said.startswith("/default/orders: deleted, with 3 objects (")
    assert said.endswith("a topic of this name begins at offset 100\n")
    assert done("topics", "--data", data) == ""
    for command in (["describe", "orders"], ["consume", "orders"], ["explain", "orders", "0"]):
        assert "it was deleted" in refused(*command, "--data", data)
    assert "topics create orders" in refused("topics", "configure", "orders", "--data", data)
    assert "there is no topic" in refused("topics", "delete", "orders", "--yes", "--data", data)
    assert "it was deleted" in refused("repair", "orders", "--data", data)
    done("topics", "create", "orders", "--data", data)
    assert done("consume", "orders", "--data", data) == ""
    with Store(small_segments(data)) as store:
        assert store.topic("orders").append(b"new") == 100


def test_it_asks_before_it_deletes(data: Path) -> None:
    for answer, code in (("n\n", 1), ("\n", 1), ("", 2)):
        result = run("topics", "delete", "orders", "--data", data, stdin=answer)
        assert result.exit_code == code, result.output
        assert "Delete /default/orders? This cannot be undone" in result.stderr
    assert done("topics", "--data", data) == "/default/orders\n"
    found = run("topics", "delete", "orders", "--data", data, "--json", stdin="y\n")
    assert found.exit_code == 0
    assert found.stdout.startswith('{"topic": "/default/orders", "deleted": [{"topic"')


def test_all_partitions_are_deleted(tmp_path: Path) -> None:
    where = ["--data", str(tmp_path)]
    done("topics", "create", "orders", "--partitions", "3", *where)
    done("topics", "create", "other", *where)
    assert "it has 3 partitions" in refused("topics", "delete", "orders", "--yes", *where)
    found = facts("topics", "delete", "orders", "--partitions", "--yes", *where)
    assert [each["topic"] for each in found["deleted"]] == [
        f"/default/orders-part-{number}" for number in (2, 1, 0)
    ]
    assert done("topics", *where) == "/default/other\n"


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["create", "a/b"], "a topic is /namespace/topic"),
        (["create", "orders", "--partitions", "2"], "exists as a topic without partitions"),
        (["create", "many", "--partitions", "1001"], "it must be 1 to 1000"),
        (["configure", "absent", "rolling=true"], "`forebay topics create absent` creates it"),
        (["create", "orders-part-0"], "exists as a topic without partitions"),
        (["delete", "a/b", "--yes"], "a topic is /namespace/topic"),
        (["delete", "absent", "--yes"], "there is no topic /default/absent"),
        (["delete", "orders", "--partitions", "--yes"], "has no partitions"),
    ],
)
def test_bad_input_is_refused_and_changes_nothing(data: Path, args: list[str], why: str) -> None:
    assert why in refused("topics", *args, "--data", data)
    assert done("topics", "--data", data) == "/default/orders\n"


def test_nothing_is_deleted_where_there_is_no_store(tmp_path: Path) -> None:
    said = refused("topics", "delete", "orders", "--yes", "--data", tmp_path / "absent")
    assert "is not a data directory" in said
    assert not (tmp_path / "absent").exists()


def test_a_running_server_creates_and_deletes(tmp_path: Path) -> None:
    settings = StoreSettings(data=tmp_path / "data", uploader=UploaderSettings(enabled=False))
    with served(settings) as server:
        url = ["--url", server.url]
        assert done("topics", "create", "orders", *url) == "/default/orders: created\n"
        found = facts("topics", "create", "many", "--partitions", "2", *url)
        assert found["partitions"] == ["/default/many-part-0", "/default/many-part-1"]
        assert "has 2 partitions" in refused("topics", "create", "many", *url)
        server.store.topic("orders").append(b"old", durability="uploaded")
        found = facts("topics", "delete", "orders", "--yes", *url)
        assert found["deleted"][0]["next_offset"] == 1
        assert "there is no topic" in refused("topics", "delete", "orders", "--yes", *url)
        assert "it was deleted" in refused("describe", "orders", *url)
        done("topics", "delete", "many", "--partitions", "--yes", *url)
        assert done("topics", *url) == ""
        assert done("topics", "create", "orders", *url) == "/default/orders: created\n"
        assert server.store.topic("orders").append(b"new") == 1
