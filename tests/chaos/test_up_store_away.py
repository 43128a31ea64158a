"""The object store goes away: appends go on, the server says so, and uploads catch up later."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from forebay.errors import ForebayError
from support.proxy import FaultProxy, Faults
from support.s3_server import S3Server
from support.server_processes import PATIENCE, ServerProcess

TOPIC: Final = "/default/orders"


def write_config(folder: Path, s3: S3Server, endpoint: str) -> Path:
    """Uploads are due at once, and the connection to the store can be cut."""
    cloud = s3.settings()
    data = folder / "data"
    document = {
        "storage": {
            "wal": {"dir": str(data / "wal")},
            "uploader": {"interval_seconds": 0.2, "max_open_seconds": 0},
            "cloud": {
                "backend": "s3",
                "root": cloud.root,
                "options": {**cloud.options, "endpoint": endpoint},
                "request_timeout_seconds": 1,
                "retry_timeout_seconds": 1,
                "max_retries": 1,
            },
        },
        "metadata": {"backend": "sqlite", "path": str(data / "catalog.db")},
        "spark": {"master": "local[2,4]"},
    }
    path = folder / "forebay.yml"
    path.write_text(yaml.safe_dump(document))
    return path


class Producer(threading.Thread):
    """Appends some messages again and again, until it is told to end."""

    def __init__(self, server: ServerProcess) -> None:
        super().__init__(daemon=True)
        self._server = server
        self.count = 0
        self.over = threading.Event()
        self.error: ForebayError | None = None

    def run(self) -> None:
        with self._server.new_client() as client:
            while not self.over.wait(0.05):
                texts = [f"{self.count + n}" for n in range(10)]
                try:
                    self.count = self._server.produce(TOPIC, texts, client)["next_offset"]
                except ForebayError as error:
                    self.error = error
                    return


def overview(server: ServerProcess) -> Any:
    return server.client.json("GET", "/v1/overview")


def uploaded(server: ServerProcess) -> int:
    return int(server.client.json("GET", f"/v1/topics{TOPIC}")["uploaded"])


def the_store_goes_away(server: ServerProcess, proxy: FaultProxy, seconds: float) -> None:
    producer = Producer(server)
    producer.start()
    server.wait_until(lambda: producer.count > 0 and uploaded(server) > 0, "an upload")
    away = Faults(refuse=True, http_error_rate=1.0)
    with proxy.faults(away):
        before, failures = producer.count, failed_uploads(server)
        server.wait_until(
            lambda: any(alert["kind"] == "store" for alert in overview(server)["alerts"]),
            "the page says that the store is away",
        )
        server.wait_until(lambda: producer.count > before + 50, "appends go on")
        # The upload that was under way when the store went away is over after two that failed.
        server.wait_until(lambda: failed_uploads(server) >= failures + 2, "uploads fail")
        stuck = uploaded(server)
        over = threading.Event()
        threading.Timer(seconds, over.set).start()
        server.wait_until(over.is_set, "the end of the outage")
        assert uploaded(server) == stuck
        assert producer.error is None
    server.wait_until(
        lambda: not any(alert["kind"] == "store" for alert in overview(server)["alerts"]),
        "the page says that the store answers",
    )
    producer.over.set()
    producer.join(PATIENCE)
    assert producer.error is None
    server.wait_until(lambda: uploaded(server) == producer.count, "uploads catch up")
    found = server.consume(TOPIC)
    assert [each["payload"] for each in found] == [f"{n}" for n in range(producer.count)]
    assert server.stop() == 0, server.said


def failed_uploads(server: ServerProcess) -> int:
    """Failed cycles of the pipeline, and failed uploads that the page reports."""
    return len(server.jobs(state="failed")) + sum(
        int(notice["count"])
        for notice in overview(server)["notices"]
        if notice["text"] == "background work failed"
    )


@pytest.mark.timeout(600)
def test_serve_goes_on_while_the_object_store_is_away(tmp_path: Path, s3: S3Server) -> None:
    with FaultProxy(s3.endpoint.removeprefix("http://"), http=True) as proxy:
        config = write_config(tmp_path, s3, proxy.url)
        with ServerProcess("serve", config, tmp_path / "log") as server:
            the_store_goes_away(server, proxy, seconds=1)


@pytest.mark.soak
@pytest.mark.spark
@pytest.mark.timeout(1200)
def test_up_goes_on_while_the_object_store_is_away_for_half_a_minute(
    tmp_path: Path, s3: S3Server
) -> None:
    with FaultProxy(s3.endpoint.removeprefix("http://"), http=True) as proxy:
        config = write_config(tmp_path, s3, proxy.url)
        with ServerProcess("up", config, tmp_path / "log") as server:
            server.wait_for_spark()
            the_store_goes_away(server, proxy, seconds=30)
