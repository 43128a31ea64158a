"""What all suites share: the disks that a log must behave alike on, and when long runs run."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.register_assert_rewrite(
    "closed_logs",
    "codec_twins",
    "disks",
    "log_steps",
    "store_workers",
    "stored_objects",
    "tiered_grounds",
    "tiered_stores",
    "topic_evidence",
)

from disks import PLACES, GatedPlace, Place, gated, in_memory  # noqa: E402 - after the above

pytest_plugins = [
    "server_fixtures",  # before those that import it
    "browser_fixtures",
    "cluster_fixtures",
    "connect_fixtures",
    "etcd_fixtures",
    "spark_fixtures",
]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As in a job that a shell put into the background: children would ignore it, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)

SOAK = os.environ.get("FOREBAY_SOAK", "0") not in {"", "0"}


SPARK = importlib.util.find_spec("pyspark") is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skipped = {
        "soak": None if SOAK else "a long run: set FOREBAY_SOAK=1",
        "spark": None if SPARK else "pyspark is not installed",
    }
    for item in items:
        for marker, reason in skipped.items():
            if reason is not None and item.get_closest_marker(marker) is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(params=sorted(PLACES))
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """A directory for a log, on each kind of disk."""
    place = PLACES[request.param](tmp_path)
    yield place
    place.close()


@pytest.fixture
def crashing() -> Iterator[Place]:
    """A directory for a log on a disk that can lose its power."""
    place = in_memory()
    yield place
    place.close()


@pytest.fixture
def gated_place() -> Iterator[GatedPlace]:
    place = gated()
    yield place
    place.close()
