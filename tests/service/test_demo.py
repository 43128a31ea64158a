"""`forebay demo`: within a minute there is something in every tier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forebay.service.demo import LOCAL_MIB, OBJECTS_MIB, WORKLOADS, demo_settings
from forebay.settings import StoreSettings
from support.server_processes import ServerProcess

TIERS = {"memory", "segment", "verified"}


def topics(server: ServerProcess) -> list[Any]:
    return list(server.client.json("GET", "/v1/overview")["topics"])


def tiers(topic: Any) -> set[str]:
    return {span["tier"] for span in topic["spans"]}


def test_what_a_demo_stores_is_bounded(tmp_path: Path) -> None:
    settings = demo_settings(StoreSettings(data=tmp_path))
    assert settings.remote_retention.size_mb == OBJECTS_MIB
    assert settings.deleter.retention_size_mb == LOCAL_MIB
    assert len(WORKLOADS) * (OBJECTS_MIB + LOCAL_MIB) < 600


@pytest.mark.spark
@pytest.mark.timeout(900)
def test_a_demo_fills_every_tier(tmp_path: Path) -> None:
    with ServerProcess("demo", tmp_path / "data", tmp_path / "log") as server:
        server.wait_until(lambda: len(topics(server)) == len(WORKLOADS), "all topics")
        server.wait_until(lambda: all(tiers(each) >= TIERS for each in topics(server)), "all tiers")
        totals = server.client.json("GET", "/v1/overview")["totals"]
        assert totals["object_messages"] > 0
        assert server.stop() == 0, server.said


@pytest.mark.soak
@pytest.mark.spark
@pytest.mark.timeout(600)
def test_a_demo_deletes_local_segments_and_goes_on(tmp_path: Path) -> None:
    with ServerProcess("demo", tmp_path / "data", tmp_path / "log") as server:
        server.wait_until(
            lambda: server.said.count("segments deleted") > 2, "local segments went", 300
        )
        before = {each["name"]: each["appended"] for each in topics(server)}
        server.wait_until(
            lambda: all(each["appended"] > before[each["name"]] for each in topics(server)),
            "it goes on",
        )
        assert server.stop() == 0, server.said
