"""`forebay topics configure`: what it says and changes, with and without a running server."""

from __future__ import annotations

from pathlib import Path

import pytest

from forebay.settings import StoreSettings, UploaderSettings
from forebay.topic.store import Store
from support.cli_runs import done, facts, make_tiered, refused, small_segments
from support.served import served


@pytest.fixture
def data(tmp_path: Path) -> Path:
    make_tiered(tmp_path / "data")
    return tmp_path / "data"


def test_it_prints_every_value_and_where_it_comes_from(data: Path) -> None:
    text = done(
        "topics", "configure", "orders", "rolling=true", "max_idle_seconds=90s", "--data", data
    )
    lines = [line.split(maxsplit=2) for line in text.splitlines()]
    assert lines[0] == ["/default/orders"]
    assert ["rolling", "true", "this topic"] in lines
    assert ["max_idle_seconds", "90s", "this topic"] in lines
    assert ["max_object_bytes", "1GiB", "default"] in lines
    assert done("topics", "configure", "orders", "--data", data) == text, "and changes nothing"


def test_the_description_has_the_same_settings(data: Path, tmp_path: Path) -> None:
    config = tmp_path / "forebay.yml"
    config.write_text(f"data: {data}\nstorage: {{uploader: {{max_open_seconds: 60s}}}}\n")
    done("topics", "configure", "orders", "retention_time_minutes=7d", "--config", config)
    text = done("describe", "orders", "--config", config)
    assert "  uploads    by the topic's owner\n" in text
    lines = [line.split(maxsplit=2) for line in text.partition("settings\n")[2].splitlines()]
    assert ["max_open_seconds", "1m", "configuration file"] in lines
    assert ["retention_time_minutes", "7d", "this topic"] in lines
    assert ["rolling", "false", "default"] in lines
    found = facts("describe", "orders", "--config", config)
    assert found["uploaded_by"] == "owner"
    [own] = [each for each in found["settings"] if each["source"] == "topic"]
    assert own == {
        "key": "retention_time_minutes",
        "value": 10080,
        "source": "topic",
        "known": True,
    }


def test_what_is_unset_has_the_stores_setting_again(data: Path) -> None:
    done("topics", "configure", "orders", "rolling=true", "max_object_bytes=1MiB", "--data", data)
    found = facts("topics", "configure", "orders", "--unset", "rolling", "--data", data)
    own = [each["key"] for each in found["settings"] if each["source"] == "topic"]
    assert own == ["max_object_bytes"]
    with Store(small_segments(data)) as store:
        settings = store.topic("orders").in_effect
        assert settings is not None
        assert settings.uploader.max_object_bytes == 1024 * 1024


def test_one_wrong_value_changes_nothing(data: Path) -> None:
    said = refused(
        "topics", "configure", "orders", "rolling=true", "max_object_bytes=x", "--data", data
    )
    assert said.startswith("forebay: max_object_bytes is 'x'; it must be a size such as 8MiB")
    found = facts("topics", "configure", "orders", "--data", data)
    assert {each["source"] for each in found["settings"]} == {"default"}


def test_a_running_server_is_asked_and_needs_no_restart(tmp_path: Path) -> None:
    uploader = UploaderSettings(enabled=True, runner="spark", interval_seconds=3600)
    with served(StoreSettings(data=tmp_path / "data", uploader=uploader)) as server:
        topic, url = server.store.topic("orders"), ["--url", server.url]
        assert "  uploads    on Spark\n" in done("describe", "orders", *url)
        found = facts("topics", "configure", "orders", "rolling=true", *url)
        assert topic.in_effect is not None
        assert topic.in_effect.uploader.rolling
        [own] = [each for each in found["settings"] if each["source"] == "topic"]
        assert (own["key"], own["value"]) == ("rolling", True)
        assert "  uploads    by the topic's owner\n" in done("describe", "orders", *url)
        said = refused("topics", "configure", "orders", "roling=1", *url)
        assert "did you mean rolling?" in said
        assert "no topic /default/absent" in refused("topics", "configure", "absent", *url)


def test_an_owner_without_a_server_follows_when_it_reads_the_catalog(data: Path) -> None:
    with Store(small_segments(data)) as store:
        topic = store.topic("orders")
        done("topics", "configure", "orders", "max_object_messages=8", "--data", data)
        assert {each.count for each in topic.upload()} == {8}
