"""`/metrics` is a page that Prometheus can read, with every open topic's watermarks."""

from __future__ import annotations

from pathlib import Path

from forebay.settings import StoreSettings, UploaderSettings
from support.prometheus_text import parse
from support.served import Served, served


def samples(server: Served, name: str) -> dict[tuple[str, ...], float]:
    """By the values of the labels."""
    answer = server.client.request("GET", "/metrics")
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    family = parse(answer.read().decode())[name]
    return {
        tuple(value for _, value in labels): number
        for (_, labels), number in family.samples.items()
    }


def test_the_page_has_the_watermarks_of_every_open_topic(tmp_path: Path) -> None:
    settings = StoreSettings(tmp_path, uploader=UploaderSettings(enabled=False))
    with served(settings) as server:
        topic = server.store.topic("orders")
        topic.append_many([b"x"] * 5, durability="synced")
        topic.upload()
        topic.append_many([b"y"] * 3, durability="synced")
        stages = {
            stage: number
            for (name, stage), number in samples(server, "forebay_topic_offset").items()
            if name == "/default/orders"
        }
        assert stages == {
            "start": 0,
            "appended": 8,
            "synced": 8,
            "uploaded": 5,
            "verified": 5,
        }
        lag = samples(server, "forebay_topic_upload_lag_messages")
        assert lag["/default/orders",] == 3


def test_the_page_tells_which_version_runs_and_since_when(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        assert list(samples(server, "forebay_build_info").values()) == [1]
        started = samples(server, "forebay_start_time_seconds")
        assert started == {(): server.context.started}
