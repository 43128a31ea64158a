"""`Service`: the process of `forebay up` and `forebay serve`.

The constructor checks what it can before anything starts: that no other server uses the directory,
that the address is free, and that Java is installed. It opens the store and binds the servers.
`run` serves, and opens topics and starts Spark in the background.

After a signal or `stop`, streams end, new requests are refused, the Spark driver ends, and the
store is synced and closed.

To add a server of another kind, implement `Listener` and add it to `Service._listeners`.

Beware: `run` takes over the main thread and its signals.
"""

from __future__ import annotations

import asyncio
import gc
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
from forebay.admin.context import ServerContext
from forebay.admin.server import AdminServer
from forebay.broker.context import BrokerContext
from forebay.broker.server import BrokerServer
from forebay.client.address import ServerInfo
from forebay.errors import ForebayError, LogClosed, ServiceUnavailable, UsageError
from forebay.format.names import parse_topic
from forebay.logs import event
from forebay.objects.buffers import limit_arenas
from forebay.service.directory import DataDirectory
from forebay.service.jobs import JobQueue
from forebay.settings import ServerAddress, StoreSettings
from forebay.topic.store import Store

_log: Final = logging.getLogger("forebay.service")
_THREADS: Final = 32
"""Shared by all requests, for calls that wait for a disk or for the network."""
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that stop the server. One that is ignored at the start, as with nohup, stays ignored."""
_START_POLL_SECONDS: Final = 0.01
_OPENING_AT_ONCE: Final = 4
_RETRY_SECONDS: Final = 10.0
_FEW_DESCRIPTORS: Final = 4096


class Listener(Protocol):
    """A server of a service: bound before anything starts, serving until it is stopped."""

    def bind(self) -> str:
        """Starts to listen, and returns the URL; UsageError if it cannot."""

    async def serve(self) -> None: ...

    @property
    def started(self) -> bool:
        """Whether it responds to requests."""

    def stop(self) -> None: ...

    def close(self) -> None: ...


class HttpListener:
    """The HTTP server of a service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._server = AdminServer(service.settings.admin)
        self.bind = self._server.bind
        self.stop = self._server.stop
        self.close = self._server.close

    async def serve(self) -> None:
        await self._server.serve(build_app(self._service.context))

    @property
    def started(self) -> bool:
        return self._server.started


class BrokerListener:
    """The gRPC server of a service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._server = BrokerServer(service.settings.broker)
        self._address = ""
        self.stop = self._server.stop
        self.close = self._server.close

    def bind(self) -> str:
        self._address = self._server.bind()
        return self._address

    async def serve(self) -> None:
        shared = self._service.context
        await self._server.serve(
            BrokerContext(shared.store, self._address, shared.registry, shared.guard)
        )

    @property
    def started(self) -> bool:
        return self._server.started


class BackgroundTask(Protocol):
    """A task that runs as long as the servers do."""

    async def run(self) -> None:
        """Runs until it is cancelled, or until its work is done. An exception ends the service."""


@dataclass(frozen=True, slots=True)
class ServiceInfo:
    """The addresses and places of a running service, to be printed."""

    url: str
    broker: str | None
    data: str
    objects: str
    catalog: str
    spark: str | None
    pid: int
    instance: str


class Service:
    """One server process over one data directory."""

    def __init__(self, settings: StoreSettings, *, spark: bool) -> None:
        """Raises UsageError, LogLocked or DiskError if it cannot run as it is configured."""
        if settings.data is None:
            raise UsageError("a server needs a data directory: name one with --data or --config")
        if spark:
            settings = _for_spark(settings)
        limit_arenas()
        raise_descriptors()  # first, as the HTTP server computes its connection limit from it
        self.settings = replace(settings, data=Path(settings.data or "").absolute())
        self._spark = spark
        self._stack = ExitStack()
        self._stop = asyncio.Event()
        self._broker: str | None = None
        """The address of the gRPC server."""
        self._listeners: list[Listener] = [HttpListener(self)]
        if settings.broker.enabled:
            self._listeners.append(BrokerListener(self))
        """The HTTP server comes first: its URL is the service's."""
        self.context: ServerContext
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
        self._broker = urls[1] if len(urls) > 1 else None
        store = Store(self.settings)
        self._stack.callback(store.close)
        store.topics()  # raises now if the catalog does not respond, not later in every request
        self.context = ServerContext(
            store,
            url=urls[0],
            unready="topics are being opened",
            store_id=directory.store_id,
            broker=self._broker_url(),
        )
        note = ServerInfo(
            self.context.url,
            self.context.instance,
            os.getpid(),
            directory.store_id,
            self.context.broker,
        )
        directory.announce(note)
        if self._spark:
            admin = self.settings.admin
            here = ServerAddress(note.url, note.instance, admin.token, admin.ca_file, note.store)
            self._jobs = JobQueue(
                replace(self.settings, server=here), seal=self.context.store.seal_for_ledgers
            )
            self.context.jobs = self._jobs
        elif self.settings.uploader.enabled and self.settings.uploader.runner == "spark":
            event(
                _log,
                logging.WARNING,
                "storage.uploader.runner is spark, but this server runs no Spark: nothing is "
                "uploaded unless you run `forebay pipeline` or `forebay offload`",
            )

    def _broker_url(self) -> str | None:
        if self._broker is None:
            return None
        if "://" in self._broker:
            return self._broker
        secure = self.settings.broker.cert_file is not None
        return f"{'https' if secure else 'http'}://{self._broker}"

    def info(self) -> ServiceInfo:
        settings = self.settings
        cloud, metadata = settings.cloud, settings.metadata
        data = Path(settings.data or "")
        sqlite = metadata.path or data / "catalog.db"
        return ServiceInfo(
            url=self.context.url,
            broker=self._broker,
            data=str(data),
            objects=cloud.root or str(data / "objects"),
            catalog=str(sqlite) if metadata.backend == "sqlite" else ",".join(metadata.endpoints),
            spark=settings.spark.master if self._spark else None,
            pid=os.getpid(),
            instance=self.context.instance,
        )

    def stop(self) -> None:
        """Makes `run` end. Call it on the event loop's thread, or in a signal handler."""
        self._stop.set()

    def run(
        self, *background: BackgroundTask, started: Callable[[], None] = lambda: None
    ) -> signal.Signals | None:
        """Runs until `stop`, and returns None, or until a signal, and returns it.

        A second signal exits the process at once. `started` is called when the servers respond.
        ServiceUnavailable if a server ended by itself.
        """
        received: list[signal.Signals] = []
        handled = [each for each in _SIGNALS if signal.getsignal(each) is not signal.SIG_IGN]
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            loop = runner.get_loop()
            for number in handled:
                loop.add_signal_handler(number, partial(self._on_signal, number, received))
            try:
                runner.run(self._main(background, started))
            finally:
                self._close(handled)
        return received[0] if received else None

    def close(self) -> None:
        """Closes a service that was never run; `run` closes it itself."""
        self._stack.close()

    def _on_signal(self, number: signal.Signals, received: list[signal.Signals]) -> None:
        if received:
            os._exit(128 + number)
        received.append(number)
        event(_log, logging.INFO, "stopping", signal=number.name)
        self._stop.set()

    async def _main(
        self, background: Sequence[BackgroundTask], started: Callable[[], None]
    ) -> None:
        pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="server")
        asyncio.get_running_loop().set_default_executor(pool)
        serving = [asyncio.create_task(each.serve()) for each in self._listeners]
        behind = [asyncio.create_task(each) for each in self._background(background)]
        stopped = asyncio.create_task(self._stop.wait())
        while not all(each.started for each in self._listeners) and not _any_done(serving):
            await asyncio.wait(serving, timeout=_START_POLL_SECONDS)
        if not _any_done(serving):
            started()
            # Collections need not look at what stays: modules, routes, settings. Calls would wait
            # for 20 ms now and then.
            gc.collect()
            gc.freeze()
        pending: set[asyncio.Task[Any]] = {stopped, *serving, *behind}
        while True:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            # A background task may end by itself, as the opener does when all topics are open.
            if any(task not in behind or task.exception() is not None for task in done):
                break
        stop_requested = self._stop.is_set()
        await self._end(serving, [stopped, *behind])
        if not stop_requested:
            raise ServiceUnavailable("a server stopped unexpectedly; see its log")

    def _background(self, tasks: Sequence[BackgroundTask]) -> list[Coroutine[Any, Any, None]]:
        opener = TopicOpener(self.context.store, self._set_unready)
        work = [opener.run(), *(each.run() for each in tasks)]
        return work if self._jobs is None else [*work, self._jobs.run()]

    def _set_unready(self, reason: str | None) -> None:
        if not self._stop.is_set():
            self.context.unready = reason

    async def _end(
        self, serving: list[asyncio.Task[None]], behind: list[asyncio.Task[Any]]
    ) -> None:
        """Stops all servers and background tasks, waits for them, and raises the first error."""
        self.context.unready = "the server is stopping"
        self.context.stopping.set()
        for listener in self._listeners:
            listener.stop()
        for task in behind:
            task.cancel()
        results = await asyncio.gather(*serving, *behind, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
                raise result

    def _close(self, handled: Sequence[signal.Signals]) -> None:
        """Closes the store. A signal during that time exits the process at once."""

        def exit_at_once(number: int, _frame: FrameType | None) -> None:
            os._exit(128 + number)

        for number in handled:
            signal.signal(number, exit_at_once)
        try:
            self._stack.close()
        finally:
            for number in handled:
                signal.signal(number, signal.SIG_DFL)
        event(_log, logging.INFO, "stopped; everything is synced")


def _any_done(tasks: Sequence[asyncio.Task[None]]) -> bool:
    return any(task.done() for task in tasks)


def _for_spark(settings: StoreSettings) -> StoreSettings:
    """The settings for a server with Spark; UsageError if Spark cannot run here."""
    from forebay.pipeline.location import job_settings
    from forebay.pipeline.session import find_java, require_packages

    settings = replace(settings, uploader=replace(settings.uploader, runner="spark"))
    settings = job_settings(settings)
    find_java()
    require_packages()
    return settings


def raise_descriptors() -> int:
    """Raises the soft limit of open files to the hard one, and returns it. Warns if it is low.

    A log has three files open. The usual soft limit of 1,024 is for programs that use select().
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (OSError, ValueError) as error:  # more than the kernel allows
            event(
                _log, logging.WARNING, "the limit of open files cannot be raised", error=str(error)
            )
    if soft != resource.RLIM_INFINITY and soft < _FEW_DESCRIPTORS:
        event(
            _log,
            logging.WARNING,
            "the limit of open files is low: a topic needs three files, a connection one; raise "
            "the hard limit (ulimit -Hn, LimitNOFILE=)",
            limit=soft,
        )
    return soft


class TopicOpener:
    """Opens every topic that has a local log, while the server already listens.

    Opening recovers the log after a crash, and lets synced messages be uploaded, although no
    request has named the topic. A topic that cannot be opened is logged and retried. It delays
    neither the other topics nor the server.
    """

    def __init__(
        self,
        store: Store,
        on_progress: Callable[[str | None], None],
        *,
        retry_seconds: float = _RETRY_SECONDS,
    ) -> None:
        """`on_progress` is called with a text, and with None when every topic was tried once."""
        self._store = store
        self._on_progress = on_progress
        self._retry_seconds = retry_seconds
        self._logged: dict[str, str] = {}
        """The last error of each topic that cannot be opened."""

    async def run(self) -> None:
        """Returns when all topics are open. Deletions that were interrupted are finished first."""
        await asyncio.to_thread(self._finish_deletions)
        left = await asyncio.to_thread(self._with_local_log)
        left = await self._open_all(left, self._on_progress)
        self._on_progress(None)
        while left:
            await asyncio.sleep(self._retry_seconds)
            left = await self._open_all(left, lambda _words: None)

    def _finish_deletions(self) -> None:
        try:
            self._store.finish_deletions()
        except LogClosed:  # the server is stopping
            return
        except (ForebayError, OSError) as error:  # the sweeper tries again
            event(_log, logging.ERROR, "deletions were not looked for", error=error)

    def _with_local_log(self) -> list[str]:
        with self._store.view() as view:
            return [name for name in view.topics() if view.directory(parse_topic(name)).is_dir()]

    async def _open_all(
        self, names: list[str], on_progress: Callable[[str | None], None]
    ) -> list[str]:
        """Opens the topics, a few at a time; returns those that could not be opened."""
        failed: list[str] = []
        done = 0

        async def work(todo: Iterator[str]) -> None:
            nonlocal done
            for name in todo:
                if not await asyncio.to_thread(self._open, name):
                    failed.append(name)
                done += 1
                on_progress(f"opening topics: {done} of {len(names)} are open")

        todo = iter(names)
        await asyncio.gather(*(work(todo) for _ in range(_OPENING_AT_ONCE)))
        return failed

    def _open(self, name: str) -> bool:
        try:
            self._store.topic(name)
        except LogClosed:  # the server is stopping
            return True
        except (ForebayError, OSError) as error:
            if self._logged.get(name) != str(error):  # log an error once, not at every retry
                self._logged[name] = str(error)
                event(
                    _log,
                    logging.ERROR,
                    "a topic cannot be opened; it will be retried",
                    topic=name,
                    error=error,
                )
            return False
        return True
