"""From settings to a catalog, and the package's public names that lead there."""

from __future__ import annotations

import forebay
from forebay.catalog.catalog import Catalog
from forebay.settings import MetadataSettings


def test_every_public_name_of_the_package_can_be_imported() -> None:
    for name in forebay.__all__:
        assert getattr(forebay, name) is not None


def test_etcd_metadata_is_a_catalog_that_sends_nothing_until_it_is_used() -> None:
    settings = MetadataSettings(backend="etcd", endpoints=["elsewhere:1"], timeout_seconds=1)
    catalog = forebay.EtcdMetadata(["127.0.0.1:1"], "/danube", settings=settings)
    assert isinstance(catalog, Catalog)
    assert "127.0.0.1:1" in catalog.name
    assert "elsewhere" not in catalog.name
    catalog.close()
