"""What a Spark worker keeps open belongs to the store that exists now."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

import forebay
from forebay.pipeline.location import job_settings
from forebay.settings import StoreSettings
from forebay.topic import resources
from forebay.topic.resources import (
    close_executor_resources,
    executor_resources,
    using_executor_resources,
)


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


def test_nothing_is_closed_that_another_thread_may_use(tmp_path: Path) -> None:
    stores = [job_settings(StoreSettings(data=tmp_path / str(number))) for number in range(6)]
    for settings in stores:
        forebay.open(settings).close()
    with using_executor_resources(), using_executor_resources():
        first = executor_resources(stores[0])
        for settings in stores[1:]:
            executor_resources(settings)
        assert executor_resources(stores[0]) is first
        assert list(first.catalog.topics()) == []
    close_executor_resources()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_opens_its_own_whatever_its_parent_was_doing(tmp_path: Path) -> None:
    settings = job_settings(StoreSettings(data=tmp_path))
    forebay.open(settings).close()
    mine = executor_resources(settings)
    with resources._open_lock:  # as if another thread of the parent were opening something
        child = os.fork()
        if child == 0:
            code = 1
            signal.alarm(100)  # a child that hangs must not outlive the test
            try:
                code = int(executor_resources(settings) is mine)
            finally:
                os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    close_executor_resources()
