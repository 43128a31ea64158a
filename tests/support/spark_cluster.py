"""A real Spark cluster on the loopback: one master and its workers, from the pip package alone.

    with LocalCluster() as cluster:
        session = spark_session(cluster.settings())

Every worker leads a session of processes of its own, which its executors and their Python
processes stay in: `kill_worker` takes all of them at once, as a machine does that is lost.

`hidden` are directories that the workers cannot see, as if they were on other machines: they find
an empty one in its place. That needs the right to mount (`can_hide`).

Beware: a process has one Spark context. Where it has one already, the driver of
this cluster has to be another process (`environment` is what to start it with).
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from forebay.pipeline.session import find_java, spark_home_without_zip
from forebay.settings import SparkSettings
from support.jvm import SPARK_OPTIONS
from support.s3_server import free_ports

START_SECONDS_MAX: Final = 300.0
END_SECONDS_MAX: Final = 300.0
STARTS_MAX: Final = 3
_LOOK_SECONDS: Final = 0.05
_OUTPUT_CHARS_SHOWN: Final = 2000
_EXECUTOR: Final = b"CoarseGrainedExecutorBackend"
_NO_MASTER: Final = {"status": "", "workers": []}
_DAEMON: Final = (
    # A port that somebody took in between is an error, not a reason for the next one.
    "-Dspark.port.maxRetries=0",
    # It would listen on a port that two clusters cannot both have.
    "-Dspark.master.rest.enabled=false",
    SPARK_OPTIONS,
)
_OPTIONS: Final = {
    "spark.executor.cores": "1",
    "spark.executor.memory": "512m",
    "spark.executor.extraJavaOptions": SPARK_OPTIONS,
    "spark.driver.memory": "512m",
    "spark.sql.shuffle.partitions": "2",
}


@dataclass(frozen=True, slots=True)
class ExecutorProcess:
    """One executor's JVM."""

    worker: int
    """The number of its worker, as `kill_worker` takes it."""
    pid: int


@dataclass(frozen=True, slots=True)
class _Seen:
    """One process that lives, as /proc has it."""

    pid: int
    session: int
    command: bytes


class LocalCluster:
    """`start` returns when all workers are registered; `stop` leaves no process and no file."""

    def __init__(
        self,
        workers: int = 2,
        *,
        cores: int = 1,
        memory: str = "1g",
        hidden: Sequence[Path] = (),
    ) -> None:
        """`cores` and `memory` are what each worker has to give to executors."""
        self.master_url = ""
        self._count = workers
        self._cores = cores
        self._memory = memory
        self._hidden = tuple(hidden)
        self._ui = ""
        self._folder: Path | None = None
        self._master: subprocess.Popen[bytes] | None = None
        self._workers: dict[int, subprocess.Popen[bytes]] = {}
        self._ports: dict[int, int] = {}
        self._next = 0

    def settings(self, options: Mapping[str, str] | None = None) -> SparkSettings:
        """For `spark_session`; `options` are Spark's own, and count before those from here."""
        return SparkSettings(self.master_url, {**_OPTIONS, **(options or {})})

    def environment(self) -> dict[str, str]:
        """That of a driver in another process."""
        return {**os.environ, **spark_environment()}

    def start(self) -> None:
        for attempt in range(STARTS_MAX):
            try:
                self._start()
            except BaseException as error:  # a port may have been taken in between
                self.stop()
                if attempt == STARTS_MAX - 1 or not isinstance(error, RuntimeError):
                    raise
            else:
                return

    def _start(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="forebay-cluster-"))
        port, ui = free_ports(2)
        self.master_url = f"spark://127.0.0.1:{port}"
        self._ui = f"http://127.0.0.1:{ui}/json/"
        self._master = self._run(
            "master", "master.Master", "--port", str(port), "--webui-port", str(ui)
        )
        # A worker that registers before the master is alive is ignored, and does not learn it.
        self._wait(lambda: self._page()["status"] == "ALIVE", START_SECONDS_MAX, "the master")
        for _ in range(self._count):
            self._launch()
        self._wait_for_workers()

    def stop(self) -> None:
        """Ends everything that was started here, executors and their Python processes too."""
        processes = list(self._workers.values())
        if self._master is not None:
            processes.append(self._master)
        self._workers, self._master = {}, None
        for process in processes:
            end_session(process)
        folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def start_worker(self) -> int:
        """One more worker, registered; its number."""
        number = self._launch()
        self._wait_for_workers()
        return number

    def kill_worker(self, number: int) -> None:
        """SIGKILL for a worker, its executors and their Python processes: a machine that is lost.

        Returns when none of them lives.
        """
        end_session(self._workers.pop(number))

    @property
    def workers(self) -> list[int]:
        """The numbers of those that were not killed."""
        return sorted(self._workers)

    def executors(self) -> list[ExecutorProcess]:
        """Those that live now, of all applications, by worker."""
        numbers = {process.pid: number for number, process in self._workers.items()}
        return sorted(
            (
                ExecutorProcess(numbers[seen.session], seen.pid)
                for seen in _processes()
                if seen.session in numbers and _EXECUTOR in seen.command
            ),
            key=lambda executor: (executor.worker, executor.pid),
        )

    def wait_for_executors(self, count: int, seconds: float = START_SECONDS_MAX) -> None:
        """Until so many are there."""
        self._wait(lambda: len(self.executors()) >= count, seconds, f"{count} executors")

    def _launch(self) -> int:
        assert self._folder is not None, "the cluster is not running"
        number = self._next
        self._next += 1
        [port] = free_ports(1)
        self._ports[number] = port
        self._workers[number] = self._run(
            f"worker-{number}",
            "worker.Worker",
            *("--port", str(port), "--webui-port", "0"),
            *("--cores", str(self._cores), "--memory", self._memory),
            *("--work-dir", str(self._folder / f"work-{number}"), self.master_url),
            before=hiding(self._hidden),
        )
        return number

    def _run(
        self, name: str, part: str, *arguments: str, before: Sequence[str] = ()
    ) -> subprocess.Popen[bytes]:
        assert self._folder is not None
        program = [*before, str(spark_home() / "bin" / "spark-class")]
        with (self._folder / f"{name}.out").open("wb") as output:
            return subprocess.Popen(
                [*program, f"org.apache.spark.deploy.{part}", "--host", "127.0.0.1", *arguments],
                env={
                    **self.environment(),
                    "SPARK_DAEMON_MEMORY": "256m",
                    "SPARK_DAEMON_JAVA_OPTS": " ".join(_DAEMON),
                    "SPARK_LOCAL_DIRS": str(self._folder / f"local-{name}"),
                },
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self._folder,
                start_new_session=True,
            )

    def _wait_for_workers(self) -> None:
        """Until the master has all that were started and not killed."""
        wanted = {self._ports[number] for number in self._workers}
        self._wait(lambda: wanted <= self._alive(), START_SECONDS_MAX, "workers")

    def _wait(self, ready: Callable[[], bool], seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not ready():
            ended = [name for name, process in self._named() if process.poll() is not None]
            if ended or time.monotonic() > deadline:
                said = "".join(self._said(name) for name in ended or ["master"])
                raise RuntimeError(f"{what}: {'ended' if ended else 'not ready'}: {said}")
            time.sleep(_LOOK_SECONDS)

    def _named(self) -> list[tuple[str, subprocess.Popen[bytes]]]:
        assert self._master is not None, "the cluster is not running"
        workers = [(f"worker-{number}", process) for number, process in self._workers.items()]
        return [("master", self._master), *workers]

    def _said(self, name: str) -> str:
        assert self._folder is not None
        output = (self._folder / f"{name}.out").read_text(errors="replace")
        return f"{name}: {output[-_OUTPUT_CHARS_SHOWN:]}\n"

    def _alive(self) -> set[int]:
        """The ports of the workers that the master has."""
        workers = self._page()["workers"]
        return {worker["port"] for worker in workers if worker["state"] == "ALIVE"}

    def _page(self) -> dict[str, Any]:
        """The master's own page, or `_NO_MASTER` if another server is at its port."""
        try:
            with urllib.request.urlopen(self._ui, timeout=5) as answer:
                found: dict[str, Any] = json.load(answer)
        except (OSError, ValueError):
            return _NO_MASTER
        return found if found.get("url") == self.master_url else _NO_MASTER

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop()


def hiding(directories: Sequence[Path]) -> list[str]:
    """What to put before a command, so that it finds these directories empty."""
    if not directories:
        return []
    mounts = "".join(f"mount -t tmpfs none {shlex.quote(str(each))} && " for each in directories)
    return ["unshare", "--mount", "sh", "-c", mounts + 'exec "$@"', "hidden"]


def can_hide() -> bool:
    """Whether this process may hide directories from others."""
    if shutil.which("unshare") is None:
        return False
    with tempfile.TemporaryDirectory() as folder:
        command = [*hiding([Path(folder)]), "true"]
        done = subprocess.run(command, capture_output=True, check=False, timeout=30)
    return done.returncode == 0


def spark_home() -> Path:
    """Where Spark's programs and jars are: inside the Python package, which is not imported."""
    spec = importlib.util.find_spec("pyspark")
    assert spec is not None, "no pyspark"
    assert spec.origin is not None
    return Path(spec.origin).parent


def spark_environment() -> dict[str, str]:
    """What a process of Spark on the loopback is started with, besides what there is."""
    return {
        "JAVA_HOME": str(find_java()),
        "SPARK_HOME": str(spark_home_without_zip()),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
    }


def end_session(leader: subprocess.Popen[Any]) -> None:
    """SIGKILL for a process that leads a session, and for all others in it; waits for their end."""
    deadline = time.monotonic() + END_SECONDS_MAX
    leader.kill()
    # One may fork while the list is gone through: so again, until nobody is left.
    while left := [seen.pid for seen in _processes() if seen.session == leader.pid]:
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes {left} do not end")
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        leader.poll()  # a dead one whose end nobody asked for stays in the list
        time.sleep(_LOOK_SECONDS)
    leader.wait()


def _processes() -> list[_Seen]:
    """All of this machine that are not dead."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            # The name in brackets may hold anything, spaces and brackets too.
            state, _, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            command = (folder / "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if state not in {"Z", "X"}:
            found.append(_Seen(int(folder.name), int(session), command))
    return found
