"""One etcd for all the tests of a run that only need some etcd."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.etcd_server import EtcdServer


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """Running. Take a key prefix of your own, and do not stop it."""
    server = EtcdServer(tmp_path_factory.mktemp("etcd")).start()
    yield server
    server.stop()
