"""Drivers of Spark applications in processes of their own, which tests kill."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from forebay.settings import StoreSettings
from support.spark_cluster import LocalCluster, end_session

PATIENCE: Final = 400.0
"""Seconds that a driver may take, its start included."""


def write_config(path: Path, data: Path, cluster: LocalCluster | None, **uploader: Any) -> Path:
    """A configuration file for the commands: small segments and objects, and the cluster."""
    settings = cluster.settings() if cluster is not None else StoreSettings(data=data).spark
    document = {
        "storage": {
            "wal": {"dir": str(data / "wal"), "rotate_max_bytes": "1MiB"},
            "uploader": {"enabled": False, **uploader},
            "cloud": {"backend": "fs", "root": str(data / "objects")},
        },
        "metadata": {"backend": "sqlite", "path": str(data / "catalog.db")},
        "spark": {"master": settings.master, "options": dict(settings.options)},
    }
    path.write_text(yaml.safe_dump(document))
    return path


class Driver:
    """One `python` process and its JVM, in a session of processes of their own."""

    def __init__(self, arguments: Sequence[str], cluster: LocalCluster, folder: Path) -> None:
        self._errors = folder / "driver.err"
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, *arguments],
                env=cluster.environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )

    @property
    def over(self) -> bool:
        return self._process.poll() is not None

    def wait_until(self, ready: Callable[[], bool]) -> bool:
        """Whether it came true while the driver was at work."""
        deadline = time.monotonic() + PATIENCE
        while not ready():
            if self.over:
                return False
            assert time.monotonic() < deadline, self._said()
            time.sleep(0.005)
        return not self.over

    def kill(self) -> None:
        """SIGKILL for Python and its JVM."""
        end_session(self._process)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def answer(self) -> Any:
        """What it printed last, as JSON; it must have ended well."""
        try:
            output, _ = self._process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(self._said()) from None
        assert self._process.returncode == 0, f"{output.decode()}\n{self._said()}"
        return json.loads(output.splitlines()[-1])

    def _said(self) -> str:
        return self._errors.read_text(errors="replace")[-4000:]
