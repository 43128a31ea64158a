"""The resources of a store are opened once, on first use, and closed together."""

from __future__ import annotations

import threading
from contextlib import closing
from pathlib import Path

import pytest

from forebay.catalog.catalog import Catalog
from forebay.catalog.sqlite import SqliteKv
from forebay.errors import ForebayError, InvalidSetting, LogClosed
from forebay.format.names import TopicName
from forebay.settings import CloudSettings, StoreSettings
from forebay.topic.resources import StoreResources, catalog_file
from support.disks import PATIENCE_SECONDS

TOPIC = TopicName("default", "orders")


def test_nothing_is_opened_before_it_is_used(tmp_path: Path) -> None:
    settings = StoreSettings(data=tmp_path / "data")
    with closing(StoreResources(settings)) as resources:
        assert not (tmp_path / "data").exists()
        assert resources.catalog.record(TOPIC) is None
        path = catalog_file(settings)
        assert path is not None
        assert path.exists()


def test_threads_share_what_is_opened(tmp_path: Path) -> None:
    with closing(StoreResources(StoreSettings(data=tmp_path))) as resources:
        start = threading.Barrier(8)
        found: list[tuple[int, ...]] = []

        def use() -> None:
            start.wait(PATIENCE_SECONDS)
            opened = (resources.catalog, resources.store, resources.fetch_pool, resources.session)
            found.append(tuple(map(id, opened)))

        threads = [threading.Thread(target=use) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 8
        assert len(set(found)) == 1


def test_tasks_read_objects_that_are_files_without_a_pool(tmp_path: Path) -> None:
    with closing(StoreResources(StoreSettings(data=tmp_path))) as resources:
        assert resources.pool is None
    remote = StoreSettings(data=tmp_path, cloud=CloudSettings(backend="memory"))
    with closing(StoreResources(remote)) as resources:
        assert resources.pool is resources.fetch_pool


def test_what_was_given_stays_open_and_nothing_is_opened_after_the_end(tmp_path: Path) -> None:
    settings = StoreSettings(data=tmp_path)
    with closing(Catalog(SqliteKv(None))) as catalog:
        resources = StoreResources(settings, catalog=catalog)
        assert resources.session.catalog is catalog
        resources.close()
        resources.close()
        assert list(catalog.topics()) == []
        with pytest.raises(LogClosed):
            _ = resources.store


def test_a_store_that_cannot_be_opened_leaves_nothing_open(tmp_path: Path) -> None:
    cloud = CloudSettings(backend="s3", root="s3://", options={})
    resources = StoreResources(StoreSettings(data=tmp_path, cloud=cloud))
    with pytest.raises((ForebayError, InvalidSetting)):
        resources.open()
    with pytest.raises((ForebayError, OSError)):
        resources.catalog.record(TOPIC)
