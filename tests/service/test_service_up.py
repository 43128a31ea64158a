"""`forebay up` as users run it: one process with a real Spark behind it, from its start to Ctrl-C.

One process for all of it: a Spark session takes seconds to start.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from forebay.client.address import read_server_info, server_file
from forebay.config import load_config
from forebay.errors import ForebayError, UnknownTopic, UsageError
from forebay.pipeline.driver import WORK_FOLDER
from forebay.topic.view import StoreView
from support.server_processes import PATIENCE, ServerProcess, lives, session_of

ORDERS: Final = "/default/orders"
ROLLING: Final = "/default/events"
LOADED: Final = ("/default/a", "/default/b")
PAYLOAD: Final = "." * 2000


def write_config(folder: Path, **cloud: Any) -> Path:
    """Cycles each half second, which take objects of one mebibyte and leave the rest for hours."""
    data = folder / "data"
    document = {
        "storage": {
            "wal": {"dir": str(data / "wal"), "rotate_max_bytes": "1MiB"},
            "uploader": {
                "interval_seconds": 0.5,
                "max_open_seconds": 7200,
                "max_object_bytes": "1MiB",
            },
            "cloud": cloud or {"backend": "fs", "root": str(data / "objects")},
        },
        "metadata": {"backend": "sqlite", "path": str(data / "catalog.db")},
        "spark": {"master": "local[2,4]"},
    }
    path = folder / "forebay.yml"
    path.write_text(yaml.safe_dump(document))
    return path


class Load:
    """Appends numbered messages to some topics until the block ends."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=[each]) for each in LOADED]
        self.counts = dict.fromkeys(LOADED, 0)
        self.errors: list[ForebayError] = []

    def _run(self, topic: str) -> None:
        with self._server.new_client() as client:
            while not self._over.wait(0.1):
                first = self.counts[topic]
                texts = [f"{topic} {first + n} {PAYLOAD}" for n in range(25)]
                try:
                    answer = self._server.produce(topic, texts, client)
                except ForebayError as error:
                    self.errors.append(error)
                    return
                assert answer["first_offset"] == first
                self.counts[topic] = answer["next_offset"]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_details: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(PATIENCE)
        assert self.errors == []


def uploaded(server: ServerProcess, topic: str) -> int:
    found = server.client.json("GET", f"/v1/topics{topic}")
    return int(found["uploaded"])


def jobs_are_run(server: ServerProcess) -> None:
    server.produce(ORDERS, [f"order {number}" for number in range(1000)])
    server.wait_for_spark()
    offload = server.run_job("offload", topics=[ORDERS])
    assert (offload["state"], offload["summary"]["messages"]) == ("done", 1000), offload
    assert offload["progress"]["done"] == offload["progress"]["total"] > 0
    moved = server.client.json("GET", "/v1/overview")["requests"]
    assert moved["bytes_up"] > 0, "what Spark's workers count is counted here"
    verify = server.run_job("verify")
    assert (verify["state"], verify["summary"]["messages"]) == ("done", 1000), verify
    with pytest.raises(UnknownTopic, match="/default/nobody"):
        server.run_job("offload", topics=["/default/nobody"])
    assert [job["id"] for job in server.jobs(trigger="request")] == [
        job["id"] for job in (verify, offload)
    ]


def uploaders(server: ServerProcess) -> dict[str, str | None]:
    """What uploads each topic, as the page has it."""
    rows = server.client.json("GET", "/v1/overview")["topics"]
    return {row["name"]: row["uploaded_by"] for row in rows}


def topics_that_roll_are_uploaded_by_the_server(server: ServerProcess) -> None:
    """Of the thresholds, only `max_idle_seconds` is near; Spark does not know it."""
    server.produce(ROLLING, ["first"])
    change = {"values": {"rolling": True, "max_idle_seconds": 0.1}}
    server.client.json("PATCH", f"/v1/topics{ROLLING}/settings", value=change)
    server.produce(ROLLING, [f"event {number}" for number in range(99)])
    server.wait_until(lambda: uploaded(server, ROLLING) == 100, "the idle object")
    shown = {ROLLING: "owner", ORDERS: "spark"}
    # The page looks at the store every few seconds.
    server.wait_until(lambda: shown.items() <= uploaders(server).items(), "both on the page")


def jobs_are_refused(server: ServerProcess) -> None:
    for wrong in (
        {"kind": "dance"},
        {"kind": "offload", "topics": "/a/b"},
        {},
        {"kind": "verify", "due": True},
    ):
        with pytest.raises(UsageError):
            server.client.json("POST", "/v1/jobs", value=wrong)
    with pytest.raises(UsageError, match="no job"):
        server.client.json("GET", "/v1/jobs/nobody")


def a_killed_driver_doubles_nothing(server: ServerProcess, config: Path, kills: int) -> None:
    random_ = random.Random(kills)
    with Load(server) as load:
        server.wait_until(lambda: all(load.counts.values()), "a load")
        for _ in range(kills):
            before = server.spark()
            tails = {topic: uploaded(server, topic) for topic in LOADED}
            server.wait_until(
                lambda: any(uploaded(server, each) > tails[each] for each in LOADED),  # noqa: B023
                "cycles of the pipeline",
            )
            time.sleep(random_.uniform(0, 0.5))  # a random moment is what is tested
            for pid in session_of(before["pid"]):
                with suppress(ProcessLookupError):  # some end by themselves when others do
                    os.kill(pid, signal.SIGKILL)
            server.wait_until(
                lambda: server.spark()["restarts"] > before["restarts"],  # noqa: B023
                "the end of the driver was seen",
            )
            server.wait_for_spark()
    cancel_a_job(server)
    job = server.run_job("offload")
    assert job["state"] == "done", job
    everything_is_there_once(server, config, load.counts)
    cycles = server.jobs(trigger="interval")
    assert any(job["state"] == "done" and job["summary"]["objects"] for job in cycles)


def cancel_a_job(server: ServerProcess) -> None:
    """At whatever moment: it ends, and so does the next one."""
    job = server.client.json("POST", "/v1/jobs", value={"kind": "compact", "target_bytes": 2**26})
    where = f"/v1/jobs/{job['id']}"
    server.wait_until(lambda: server.client.json("GET", where)["state"] != "queued", "its turn")
    server.client.json("DELETE", where)
    over = {"done", "cancelled"}
    server.wait_until(lambda: server.client.json("GET", where)["state"] in over, "its end")


def everything_is_there_once(server: ServerProcess, config: Path, counts: dict[str, int]) -> None:
    with StoreView(load_config(config)) as view:
        for name, count in counts.items():
            record = view.topic(name).record
            assert record is not None
            assert record.tail == record.verified == count
            at = 0
            for descriptor in view.topic(name).objects():
                assert descriptor.start_offset == at, "the chain has a gap or an overlap"
                at = descriptor.next_offset
            found = server.consume(name)
            assert [each["offset"] for each in found] == list(range(count))
            assert all(each["payload"].startswith(f"{name} {each['offset']} ") for each in found)
    assert server.run_job("verify")["state"] == "done"


def ctrl_c_ends_it(server: ServerProcess, data: Path) -> None:
    pids = session_of(server.spark()["pid"])
    server.produce(ORDERS, ["the last one"])
    assert server.stop(signal.SIGINT) == 0, server.said
    assert not server_file(data).exists()
    assert "everything is synced" in server.said
    deadline = time.monotonic() + PATIENCE
    while any(lives(pid) for pid in pids):
        assert time.monotonic() < deadline, "the driver or its JVM stayed"
        time.sleep(0.05)
    states = [json.loads(line)["state"] for line in (data / "jobs.ndjson").read_text().splitlines()]
    assert states
    assert "running" not in states


@pytest.mark.spark
@pytest.mark.timeout(900)
def test_up_from_its_start_to_ctrl_c(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    data = tmp_path / "data"
    in_json = ("--log-format", "json", "--log-level", "info")
    with ServerProcess("up", config, tmp_path / "log", options=in_json) as server:
        server.wait_ready()
        note = read_server_info(data)
        assert note is not None
        assert (note.pid, note.url) == (server.pid, server.where["url"])
        jobs_are_run(server)
        topics_that_roll_are_uploaded_by_the_server(server)
        everything_is_private(data)
        jobs_are_refused(server)
        a_killed_driver_doubles_nothing(server, config, kills=1)
        ctrl_c_ends_it(server, data)
    assert "gRPC" not in (tmp_path / "log").read_text(), "a line about the fork that starts Spark"
    every_line_is_json(tmp_path / "log")
    with ServerProcess("serve", config, tmp_path / "log") as server:
        server.wait_ready()
        assert server.consume(ORDERS)[-1]["payload"] == "the last one"
        assert server.jobs() == []
        with pytest.raises(ForebayError, match="forebay up"):
            server.client.json("POST", "/v1/jobs", value={"kind": "offload"})
        assert server.stop(signal.SIGTERM) == 0


def every_line_is_json(log: Path) -> None:
    """Also of the driver that was killed, and to the last line."""
    found = [json.loads(line) for line in log.read_text().splitlines()]
    said = {each["event"] for each in found}
    assert {"object started", "object committed", "segment rotated"} <= said
    assert found[-1]["event"] == "stopped; everything is synced"
    topics = {each["topic"] for each in found if "topic" in each}
    assert topics
    assert all(name.startswith("/default/") for name in topics)


def everything_is_private(data: Path) -> None:
    """What Spark writes below the data directory too."""
    assert server_file(data).is_file()
    assert any((data / WORK_FOLDER).rglob("*"))
    for path in (data, *data.rglob("*")):
        with suppress(FileNotFoundError):  # Spark removes files meanwhile
            assert not path.lstat().st_mode & 0o077, path


@pytest.mark.spark
@pytest.mark.timeout(900)
def test_a_server_that_is_killed_leaves_no_driver_behind(tmp_path: Path) -> None:
    """Here while Spark starts; in the long run while it works."""
    with ServerProcess("up", write_config(tmp_path), tmp_path / "log") as server:
        server.wait_until(lambda: len(session_of(server.spark()["pid"] or -1)) > 1, "a JVM")
        no_driver_is_left_behind(server)


def no_driver_is_left_behind(server: ServerProcess) -> None:
    driver = server.spark()["pid"]
    server.kill()
    deadline = time.monotonic() + PATIENCE
    while left := session_of(driver):
        assert time.monotonic() < deadline, f"{left} are still there"
        time.sleep(0.05)


@pytest.mark.soak
@pytest.mark.spark
@pytest.mark.timeout(1200)
def test_five_drivers_are_killed_and_nothing_is_doubled(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    with ServerProcess("up", config, tmp_path / "log") as server:
        server.wait_for_spark()
        a_killed_driver_doubles_nothing(server, config, kills=5)
        server.wait_until(lambda: server.spark()["state"] == "working", "a cycle")
        no_driver_is_left_behind(server)
