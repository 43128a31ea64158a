"""When tests run: long ones, and those that need Spark. Fixtures are in `support/`."""

from __future__ import annotations

import importlib.util
import os
import signal
import time

import pytest
from hypothesis import HealthCheck, settings

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

for _number, _handler in (
    (signal.SIGINT, signal.default_int_handler),  # ignored in a shell's background job
    (signal.SIGHUP, signal.SIG_DFL),  # ignored under nohup
    (signal.SIGTERM, signal.SIG_DFL),
):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)  # children inherit what is ignored

# What a caller's shell may set that would change what a test sees.
PREFIXES = ("AWS_", "AZURE_", "GOOGLE_", "PYSPARK_", "SPARK_")
NAMES = {"COLUMNS", "FORCE_COLOR", "NO_COLOR", "PYTHONDONTWRITEBYTECODE", "PYTHONOPTIMIZE"} | {
    "FOREBAY_CONFIG",
    "FOREBAY_DATA",
    "FOREBAY_TOKEN",
}
for _name in list(os.environ):
    if _name.startswith(PREFIXES) or _name in NAMES or _name.lower().endswith("_proxy"):
        del os.environ[_name]
os.environ |= {"LC_ALL": "C.UTF-8", "TZ": "UTC"}
time.tzset()
os.umask(0o022)

# Hypothesis fails an example that takes 200 ms, and data that take long to make: a busy machine.
settings.register_profile(
    "forebay", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("forebay")

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
