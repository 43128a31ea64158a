"""kill -9 of the broker and of consumers, again and again, with Danube's own clients.

Three producers, and four consumers of each type of subscription, in processes of their own. They
write down what was acknowledged and delivered, and the oracle compares.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from forebay.catalog.catalog import Catalog
from forebay.catalog.sqlite import SqliteKv
from forebay.catalog.subscriptions import subscription_cursors
from forebay.format.cursor import Cursor
from forebay.format.names import parse_topic
from support.danube_load import SUBSCRIPTIONS
from support.delivery_oracle import Oracle
from support.paths import TESTS
from support.prometheus_text import parse
from support.s3_server import free_ports
from support.server_processes import PATIENCE, ServerProcess

TOPIC = "/default/orders"
CONSUMERS = 4
UNACKED = 20
FLUSH_SECONDS = 0.5
SETTINGS = f"""\
data: data
broker:
  subscription_start: earliest
  max_unacked_messages: {UNACKED}
  ack_timeout_ms: 30000
metadata:
  progress_flush_interval_seconds: {FLUSH_SECONDS}
"""
_LOOK_SECONDS = 0.05


@dataclass(slots=True)
class Figures:
    """What a run did, for its last line."""

    broker_kills: int = 0
    consumer_kills: int = 0
    looks: int = 0
    repeatable: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SUBSCRIPTIONS, 0))
    """What may have been delivered again because of a kill."""

    @property
    def kills(self) -> int:
        return self.broker_kills + self.consumer_kills


class Run:
    def __init__(self, folder: Path, rng: random.Random) -> None:
        self._folder = folder
        self._rng = rng
        self._port = free_ports(1)[0]
        self._config = folder / "forebay.yml"
        self._config.write_text(SETTINGS)
        self._clients: dict[str, subprocess.Popen[bytes]] = {}
        self.oracle = Oracle(folder)
        self.figures = Figures()
        self.server = self._start_server()
        self._catalog = Catalog(SqliteKv(folder / "data" / "catalog.db"))

    def _start_server(self) -> ServerProcess:
        return ServerProcess(
            "serve", self._config, self._folder / "log", broker=f"127.0.0.1:{self._port}"
        )

    def start_client(self, what: str, name: str) -> None:
        url, path = f"http://127.0.0.1:{self._port}", self._folder / f"{name}.events"
        self._clients[name] = subprocess.Popen(
            [sys.executable, "-m", "support.danube_load", what, url, TOPIC, str(path), name],
            cwd=TESTS,
        )

    def end_client(self, name: str) -> None:
        process = self._clients.pop(name)
        assert process.poll() is None, f"{name} ended by itself with {process.returncode}"
        process.kill()
        process.wait(PATIENCE)

    def kill_broker(self) -> None:
        self.server.kill()
        self.server.__exit__(None, None, None)
        self.figures.broker_kills += 1
        cursors = self.check_cursors()
        for where, cursor in cursors.items():
            known = self.oracle.subscriptions[where].beyond(cursor)
            self.figures.repeatable[where] += known + CONSUMERS * UNACKED
        self.server = self._start_server()

    def kill_consumer(self) -> None:
        name = f"c{self._rng.randrange(CONSUMERS)}"
        self.end_client(name)
        self.figures.consumer_kills += 1
        for where in SUBSCRIPTIONS:
            self.figures.repeatable[where] += UNACKED
        self.start_client("consume", name)

    def check_cursors(self) -> dict[str, Cursor]:
        """No cursor in the catalog holds what nobody acknowledged."""
        cursors = dict(subscription_cursors(self._catalog, parse_topic(TOPIC)))
        self.oracle.look()
        for where, cursor in cursors.items():
            self.oracle.subscriptions[where].require_behind(cursor, f"the cursor of {where}")
        self.figures.looks += 1
        return cursors

    def check_reported(self) -> dict[str, int]:
        """Neither does what the server says; returns the positions."""
        page = self.server.client.request("GET", "/metrics").read().decode()
        samples = parse(page)["forebay_subscription_position"].samples
        found = {dict(labels)["subscription"]: int(at) for (_, labels), at in samples.items()}
        self.oracle.look()
        for where, position in found.items():
            self.oracle.subscriptions[where].require_behind(Cursor(position), f"{where}, as said,")
        return found

    def wait_until(self, ready: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not ready():
            assert time.monotonic() < deadline, f"{what} did not happen: {self.server.said}"
            time.sleep(_LOOK_SECONDS)

    def wait_for_news(self) -> None:
        """Waits until every subscription has got a new message."""
        ends = {where: self._last(where) for where in SUBSCRIPTIONS}

        def ready() -> bool:
            self.check_cursors()
            return all(self._last(where) > end for where, end in ends.items())

        self.wait_until(ready, "a new message for every subscription")

    def _last(self, where: str) -> int:
        return max(
            (each.offset for each in self.oracle.subscriptions[where].deliveries), default=-1
        )

    def is_over(self) -> bool:
        """Whether every subscription has acknowledged everything."""
        end = int(self.server.client.json("GET", f"/v1/topics{TOPIC}")["synced"])
        return set(self.check_reported().values()) == {end}

    def close(self) -> None:
        for process in self._clients.values():
            process.kill()
            process.wait(PATIENCE)
        self.server.__exit__(None, None, None)
        self._catalog.kv.close()


def run_with_kills(
    folder: Path, seed: int, *, kills: int = 0, seconds: float = 0.0, pause: float = 0.5
) -> None:
    """Kills so often at least, and for so long at least.

    Between two kills, every subscription gets a new message; then comes a pause of random length.
    """
    rng = random.Random(seed)
    run = Run(folder, rng)
    try:
        run.start_client("produce", "p")
        for each in range(CONSUMERS):
            run.start_client("consume", f"c{each}")
        run.wait_for_news()
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline or run.figures.kills < kills:
            rng.choice([run.kill_broker, run.kill_consumer])()
            run.wait_for_news()
            until = time.monotonic() + rng.uniform(0, pause)
            while time.monotonic() < until:  # a random moment is what is tested
                run.check_cursors()
                time.sleep(_LOOK_SECONDS)
        run.end_client("p")
        run.wait_until(run.is_over, "the end of every subscription")
        require_promises(run, seed)
    finally:
        run.close()


def require_promises(run: Run, seed: int) -> None:
    oracle, figures = run.oracle, run.figures
    run.check_cursors()
    for where in SUBSCRIPTIONS:
        evidence = oracle.subscriptions[where]
        assert oracle.missing(where) == set(), where
        if where != "shared":
            evidence.require_order(by_key=where == "keyed")
        bound = evidence.nacks + figures.repeatable[where]
        assert evidence.repeated <= bound, (where, evidence.repeated, bound)
        sys.stdout.write(
            f"{where}: {len(evidence.deliveries)} deliveries, {evidence.repeated} repeated "
            f"(at most {bound}), {evidence.nacks} nacks\n"
        )
    sys.stdout.write(
        f"seed {seed}: {len(oracle.sent)} messages, {figures.broker_kills} kills of the broker, "
        f"{figures.consumer_kills} of consumers, {figures.looks} looks at cursors\n"
    )


@pytest.mark.timeout(600)
def test_kills_of_broker_and_consumers_lose_nothing(tmp_path: Path) -> None:
    run_with_kills(tmp_path, seed=1, kills=5)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("minutes", [float(os.environ.get("FOREBAY_KILL_MINUTES", "30"))])
def test_kills_for_half_an_hour_lose_nothing(tmp_path: Path, minutes: float) -> None:
    run_with_kills(tmp_path, random.randrange(10**6), seconds=minutes * 60, pause=5.0)
