"""What a worker keeps open belongs to the store that is there now."""

from __future__ import annotations

from pathlib import Path

import forebay
from forebay.pipeline.location import job_settings
from forebay.settings import StoreSettings
from forebay.topic.resources import close_executor_resources, executor_resources


def test_a_catalog_that_was_made_anew_is_opened_anew(tmp_path: Path) -> None:
    settings = job_settings(StoreSettings(data=tmp_path))
    with forebay.open(settings) as store:
        store.topic("old").append(b"x", durability="synced")
    first = executor_resources(settings)
    assert executor_resources(settings) is first
    assert [topic.topic for topic in first.catalog.topics()] == ["old"]
    kept = tmp_path / "kept"  # else the new file could get the old one's number
    kept.mkdir()
    for file in tmp_path.glob("catalog*"):
        file.rename(kept / file.name)
    with forebay.open(settings) as store:
        store.topic("new").append(b"x", durability="synced")
    assert [topic.topic for topic in executor_resources(settings).catalog.topics()] == ["new"]
    close_executor_resources()
