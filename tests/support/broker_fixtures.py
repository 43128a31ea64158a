"""Fixtures of a broker in the process of the test. gRPC is imported by the tests that use them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from support.danube_brokers import DanubeBroker, DanubeUser


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[DanubeBroker]:
    """A broker with the default settings, on an empty store."""
    from support.danube_brokers import running_broker

    async with running_broker(tmp_path / "data") as found:
        yield found


@pytest.fixture
def danube(broker: DanubeBroker) -> DanubeUser:
    """Danube's own client of the broker."""
    return broker.user
