"""When tests run: long ones, and those that need Spark. Fixtures are in `support/`."""

from __future__ import annotations

import importlib.util
import os
import signal
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite("support")

from support.jvm import LAUNCHER_OPTIONS, SPARK_OPTIONS  # noqa: E402  # is rewritten, too

pytest_plugins = [
    "support.server_fixtures",  # before those that import it
    "support.broker_fixtures",
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
os.environ |= {"SPARK_SUBMIT_OPTS": SPARK_OPTIONS, "SPARK_LAUNCHER_OPTS": LAUNCHER_OPTIONS}
time.tzset()
os.umask(0o022)

# Hypothesis fails an example that takes 200 ms, and data that take long to make: a busy machine.
settings.register_profile(
    "forebay", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("forebay")

SOAK = os.environ.get("FOREBAY_SOAK", "0") not in {"", "0"}
SPARK = importlib.util.find_spec("pyspark") is not None


SHARED = {
    "spark": "spark",
    "spark_cluster": "cluster",
    "blind_cluster": "cluster",
    "connect_server": "cluster",
    "browser": "browser",
}
"""What takes seconds to start, and the group of tests that one worker of xdist runs with it."""


SERVERS = {"azure", "etcd", "gcs", "s3"}
"""Fixtures that start a server, and the parameters of fixtures that use them."""
WHOLE = {"bench", "chaos", "scenarios"}
"""Folders of tests that run the system as a whole."""


def pytest_configure(config: pytest.Config) -> None:
    """Other temporary files go where those of `tmp_path` do: to memory, where there is room."""
    if config.option.basetemp is not None:
        os.environ["TMPDIR"] = str(Path(config.option.basetemp).absolute().parent)
        tempfile.tempdir = None  # read again


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        if item.get_closest_marker("soak") is not None and not SOAK:
            item.add_marker(pytest.mark.skip(reason="a long run: set FOREBAY_SOAK=1"))
        if item.get_closest_marker("spark") is not None and not SPARK:
            item.add_marker(pytest.mark.skip(reason="pyspark is not installed"))
        parts = {item.path.parent.name, item.path.stem}
        if "chaos" in parts or "kill" in item.path.stem:
            item.add_marker("kill")
        parameters = getattr(getattr(item, "callspec", None), "params", {}).values()
        used = {each for each in [*fixtures, *parameters] if isinstance(each, str)}
        if parts & (WHOLE | {"test_bare", "test_packaging"}) or used & SERVERS:
            item.add_marker("long")
        for fixture, group in SHARED.items():
            if fixture in fixtures:
                item.add_marker(pytest.mark.xdist_group(group))
                item.add_marker("browser" if group == "browser" else "spark")
        if item.get_closest_marker("spark") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(900))
