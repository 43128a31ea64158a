"""When tests run: long ones, and those that need Spark. Fixtures are in `support/`."""

from __future__ import annotations

import importlib.util
import os
import signal

import pytest

pytest.register_assert_rewrite("support")

pytest_plugins = [
    "support.server_fixtures",  # before those that import it
    "support.browser_fixtures",
    "support.cluster_fixtures",
    "support.connect_fixtures",
    "support.etcd_fixtures",
    "support.fixtures",
    "support.spark_fixtures",
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
