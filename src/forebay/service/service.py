"""`Service`: one server process, from its first check to its last sync.

What can be refused is refused before anything is started: the directory that another server has,
the address that is taken, the Java that is missing. Then the store is opened and the servers
listen; topics are opened, and Spark is started, behind them.

    signal or `stop`  ->  streams end, nothing new is taken, the driver ends, the store is synced

What a caller gets wrong: `run` takes over the main thread and its signals.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final, Protocol

import uvloop

from forebay.admin.app import build_app
from forebay.admin.server import AdminServer
from forebay.admin.site import Site
from forebay.client import ServerNote
from forebay.errors import ForebayError, LogClosed, ServiceUnavailable, UsageError
from forebay.format.names import parse_topic
from forebay.logs import event
from forebay.service.directory import DataDirectory
from forebay.service.jobs import JobQueue
from forebay.settings import ServerAddress, StoreSettings
from forebay.topic.store import Store

# ---- Opens the topics of a store behind a server that already listens.
#
# Every topic with a local log is opened: what was synced and not uploaded goes on its way, and
# what a crash left is mended, without anybody asking for the topic. One that cannot be opened is
# told and tried again; it does not keep the others, or the server, from their work.


_AT_A_TIME: Final = 4
_AGAIN_SECONDS: Final = 10.0


class TopicOpener:
    """`run` ends when all are open, or it is cancelled."""

    def __init__(
        self,
        store: Store,
        told: Callable[[str | None], None],
        *,
        again_seconds: float = _AGAIN_SECONDS,
    ) -> None:
        """`told` gets how far it is, in words, and None when every topic was tried once."""
        self._store = store
        self._told = told
        self._again_seconds = again_seconds
        self._told_of: dict[str, str] = {}
        """Why each that cannot be opened cannot."""

    async def run(self) -> None:
        left = await asyncio.to_thread(self._with_local_log)
        left = await self._pass(left, self._told)
        self._told(None)
        while left:
            await asyncio.sleep(self._again_seconds)
            left = await self._pass(left, lambda _words: None)

    def _with_local_log(self) -> list[str]:
        with self._store.view() as view:
            return [name for name in view.topics() if view.directory(parse_topic(name)).is_dir()]

    async def _pass(self, names: list[str], told: Callable[[str | None], None]) -> list[str]:
        """Opens them, a few at a time; answers those that could not be opened."""
        failed: list[str] = []
        done = 0

        async def work(todo: Iterator[str]) -> None:
            nonlocal done
            for name in todo:
                if not await asyncio.to_thread(self._open, name):
                    failed.append(name)
                done += 1
                told(f"opening topics: {done} of {len(names)} are open")

        todo = iter(names)
        await asyncio.gather(*(work(todo) for _ in range(_AT_A_TIME)))
        return failed

    def _open(self, name: str) -> bool:
        try:
            self._store.topic(name)
        except LogClosed:  # the server stops
            return True
        except (ForebayError, OSError) as error:
            if self._told_of.get(name) != str(error):  # once, not with each try
                self._told_of[name] = str(error)
                event(
                    _log,
                    logging.ERROR,
                    "a topic cannot be opened; it is tried again",
                    topic=name,
                    error=error,
                )
            return False
        return True


# ---- How many files and connections the process may have open: as many as it is allowed to.
#
# A log has three files open, and the usual soft limit of 1,024 is for programs that cannot count
# further. A process may raise its own soft limit up to the hard one.


_FEW: Final = 4096


def raise_descriptors() -> int:
    """Raises the soft limit to the hard one, and answers it; where it is low, that is told."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (OSError, ValueError) as error:  # more than the kernel gives anybody
            event(_log, logging.WARNING, "the limit of open files stays as it is", error=str(error))
    if soft != resource.RLIM_INFINITY and soft < _FEW:
        event(
            _log,
            logging.WARNING,
            "few files may be open: a topic needs three, and a connection one; raise the hard "
            "limit (ulimit -Hn, LimitNOFILE=)",
            limit=soft,
        )
    return soft


# ---- service


_log: Final = logging.getLogger("forebay.service")
_THREADS: Final = 32
"""That requests share for what waits for a disk or a network."""
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""One that whoever started the process has it ignore (nohup does) stays ignored."""
_LOOK_SECONDS: Final = 0.01


class Companion(Protocol):
    """What runs beside the servers, for as long as they do."""

    async def run(self) -> None:
        """Until it is cancelled; what it raises ends the service."""


class Listener(Protocol):
    """A server of a service: it is bound before anything starts, and serves until it is stopped."""

    def bind(self) -> str:
        """Takes its address, and answers the URL; UsageError if it cannot."""

    async def serve(self) -> None: ...

    @property
    def started(self) -> bool:
        """Whether it answers."""

    def stop(self) -> None: ...

    def close(self) -> None: ...


class _Http:
    """The HTTP server as one of the servers."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._server = AdminServer(service.settings.admin)
        self.bind = self._server.bind
        self.stop = self._server.stop
        self.close = self._server.close

    async def serve(self) -> None:
        await self._server.serve(build_app(self._service.site))

    @property
    def started(self) -> bool:
        return self._server.started


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where everything is, for people and for programs."""

    url: str
    data: str
    objects: str
    catalog: str
    spark: str | None
    pid: int
    instance: str


class Service:
    """One server over one data directory."""

    def __init__(self, settings: StoreSettings, *, spark: bool) -> None:
        """UsageError, LogLocked or DiskError if it cannot run as it is configured."""
        if settings.data is None:
            raise UsageError("a server needs a data directory: name one with --data or --config")
        if spark:
            settings = _for_spark(settings)
        raise_descriptors()  # before the server counts how many connections it may have
        self.settings = replace(settings, data=Path(settings.data or "").absolute())
        self._spark = spark
        self._stack = ExitStack()
        self._stop = asyncio.Event()
        self._listeners: list[Listener] = [_Http(self)]
        """The broker takes its place here, behind the HTTP server."""
        self.site: Site
        self._jobs: JobQueue | None = None
        try:
            self._prepare()
        except BaseException:
            self._stack.close()
            raise

    def _prepare(self) -> None:
        assert self.settings.data is not None
        directory = DataDirectory(Path(self.settings.data))
        self._stack.callback(directory.close)
        urls = []
        for listener in self._listeners:
            self._stack.callback(listener.close)
            urls.append(listener.bind())
        store = Store(self.settings)
        self._stack.callback(store.close)
        store.topics()  # a catalog that does not answer is told now, and not by every request
        self.site = Site(
            store,
            url=urls[0],
            unready="topics are being opened",
            store_id=directory.store_id,
        )
        note = ServerNote(self.site.url, self.site.instance, os.getpid(), directory.store_id)
        directory.announce(note)
        if self._spark:
            admin = self.settings.admin
            here = ServerAddress(note.url, note.instance, admin.token, admin.ca_file, note.store)
            self._jobs = JobQueue(replace(self.settings, server=here))
            self.site.jobs = self._jobs
        elif self.settings.uploader.enabled and self.settings.uploader.runner == "spark":
            event(
                _log,
                logging.WARNING,
                "storage.uploader.runner is spark, and this server runs no Spark: nothing is "
                "uploaded until `forebay pipeline` or `forebay offload` does it",
            )

    def whereabouts(self) -> Whereabouts:
        settings = self.settings
        cloud, metadata = settings.cloud, settings.metadata
        data = Path(settings.data or "")
        sqlite = metadata.path or data / "catalog.db"
        return Whereabouts(
            url=self.site.url,
            data=str(data),
            objects=cloud.root or str(data / "objects"),
            catalog=str(sqlite) if metadata.backend == "sqlite" else ",".join(metadata.endpoints),
            spark=settings.spark.master if self._spark else None,
            pid=os.getpid(),
            instance=self.site.instance,
        )

    def stop(self) -> None:
        """Ends `run`. From the event loop's thread, or a signal's handler."""
        self._stop.set()

    def run(
        self, *companions: Companion, started: Callable[[], None] = lambda: None
    ) -> signal.Signals | None:
        """Until `stop` or a signal, which is answered; a second signal ends the process at once.

        `started` is called when the servers answer.
        """
        seen: list[signal.Signals] = []
        heeded = [each for each in _SIGNALS if signal.getsignal(each) is not signal.SIG_IGN]
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            loop = runner.get_loop()
            for number in heeded:
                loop.add_signal_handler(number, partial(self._signalled, number, seen))
            try:
                runner.run(self._main(companions, started))
            finally:
                self._close(heeded)
        return seen[0] if seen else None

    def _signalled(self, number: signal.Signals, seen: list[signal.Signals]) -> None:
        if seen:
            os._exit(128 + number)
        seen.append(number)
        event(_log, logging.INFO, "stopping", signal=number.name)
        self._stop.set()

    async def _main(self, companions: tuple[Companion, ...], started: Callable[[], None]) -> None:
        pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="server")
        asyncio.get_running_loop().set_default_executor(pool)
        serving = [asyncio.create_task(each.serve()) for each in self._listeners]
        behind = [asyncio.create_task(each) for each in self._behind(companions)]
        stopped = asyncio.create_task(self._stop.wait())
        while not all(each.started for each in self._listeners) and not _any_done(serving):
            await asyncio.wait(serving, timeout=_LOOK_SECONDS)
        if not _any_done(serving):
            started()
        pending: set[asyncio.Task[Any]] = {stopped, *serving, *behind}
        while True:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            # What is behind the servers may come to its end: all topics are open, say.
            if any(task not in behind or task.exception() is not None for task in done):
                break
        asked = self._stop.is_set()
        await self._end(serving, [stopped, *behind])
        if not asked:
            raise ServiceUnavailable("a server ended by itself; its log says why")

    def _behind(self, companions: tuple[Companion, ...]) -> list[Coroutine[Any, Any, None]]:
        opener = TopicOpener(self.site.store, self._tell)
        work = [opener.run(), *(each.run() for each in companions)]
        return work if self._jobs is None else [*work, self._jobs.run()]

    def _tell(self, unready: str | None) -> None:
        if not self._stop.is_set():
            self.site.unready = unready

    async def _end(
        self, serving: list[asyncio.Task[None]], behind: list[asyncio.Task[Any]]
    ) -> None:
        """The servers and what is behind them end side by side; then the first error is raised."""
        self.site.unready = "the server is stopping"
        self.site.stopping.set()
        for listener in self._listeners:
            listener.stop()
        for task in behind:
            task.cancel()
        results = await asyncio.gather(*serving, *behind, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
                raise result

    def _close(self, heeded: Sequence[signal.Signals]) -> None:
        """A second signal counts while the store is closed, too."""

        def at_once(number: int, _frame: FrameType | None) -> None:
            os._exit(128 + number)

        for number in heeded:
            signal.signal(number, at_once)
        try:
            self._stack.close()
        finally:
            for number in heeded:
                signal.signal(number, signal.SIG_DFL)
        event(_log, logging.INFO, "stopped; everything is synced")

    def close(self) -> None:
        """Of a service that was never run."""
        self._stack.close()


def _any_done(tasks: Sequence[asyncio.Task[None]]) -> bool:
    return any(task.done() for task in tasks)


def _for_spark(settings: StoreSettings) -> StoreSettings:
    """Refuses what cannot work, before anything is started."""
    from forebay.pipeline.location import job_settings
    from forebay.pipeline.session import find_java

    settings = replace(settings, uploader=replace(settings.uploader, runner="spark"))
    settings = job_settings(settings)
    find_java()
    return settings
