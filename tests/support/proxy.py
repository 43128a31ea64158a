"""A TCP proxy with faults, to put in front of a real object store or a real etcd.

    with FaultProxy("127.0.0.1:9000", http=True, seed=7) as proxy:
        store = open_at(proxy.url)
        with proxy.faults(Faults(latency_ms=30, http_error_rate=0.1)):
            ...
        assert proxy.requests_by_method()["PUT"] == 12

`FaultProxy` runs in a thread of this process. `ProxyProcess` has the same methods and runs
`python -m support.proxy`, so that a benchmark does not share its interpreter with it. That
program prints its port on the first line, then answers each line of JSON on its standard input with
one: `{"set": {...}}` takes all fields of `Faults` that differ from the default, `{"stats": true}`
returns `ProxyStats`. It ends when its input does.

Beware: `http=True` is needed to count requests and to answer them with errors,
and it resets whatever is not HTTP/1.1, gRPC too. A fault is repeatable for a seed as far as the
order of connections and requests is.
"""

from __future__ import annotations

import abc
import argparse
import asyncio
import concurrent.futures
import contextlib
import dataclasses
import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, Self, TypeVar

from forebay.errors import InvalidSetting
from support.paths import TESTS
from support.proxy_http import HttpConnection
from support.proxy_relay import Address, Connection, Faults, ProxyStats, Traffic, reset_socket

__all__ = ["FaultProxy", "Faults", "ProxyProcess", "ProxyStats"]

_ANSWER_SECONDS_MAX: Final = 60.0
"""How long a change, a question, a start or an end may take before it is an error."""
_BACKLOG: Final = 1024
_CONNECTIONS_MAX: Final = 1024
_ACCEPT_RETRY_SECONDS: Final = 0.1
_MODULE: Final = "support.proxy"

_T = TypeVar("_T")


class _Proxy(abc.ABC):
    """What both kinds of proxy can do."""

    host: str
    port: int
    _faults: Faults

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    @abc.abstractmethod
    def set(self, faults: Faults) -> None:
        """Replaces all faults. They are in effect when it returns."""

    @abc.abstractmethod
    def stats(self) -> ProxyStats: ...

    @abc.abstractmethod
    def close(self) -> None:
        """Ends all connections and the proxy, within a bounded time. May be called again."""

    @contextlib.contextmanager
    def faults(self, faults: Faults) -> Iterator[None]:
        """These faults for a while, then those from before."""
        before = self._faults
        self.set(faults)
        try:
            yield
        finally:
            self.set(before)

    def requests_by_method(self) -> dict[str, int]:
        return self.stats().requests

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


class FaultProxy(_Proxy):
    """A proxy in a thread of its own. It listens when the constructor returns.

    `upstream` and `listen` are "host:port"; port 0 takes a free one. Raises `InvalidSetting` for
    an address that is none and for faults that the proxy cannot make.
    """

    def __init__(
        self,
        upstream: str,
        *,
        http: bool = False,
        faults: Faults | None = None,
        seed: int = 0,
        listen: str = "127.0.0.1:0",
    ) -> None:
        self._http = http
        self._faults = self._checked(faults or Faults())
        family, address = _resolved(listen)
        target = _resolved(upstream)
        listening = socket.create_server(address, family=family, backlog=_BACKLOG)
        listening.settimeout(0)
        self.host, self.port = listening.getsockname()[:2]
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(self._failed)
        self._failure: BaseException | None = None
        traffic = Traffic(self._loop, self._faults, seed)
        self._listener = _Listener(traffic, listening, target, http=http)
        self._thread = threading.Thread(target=self._run, name="fault-proxy", daemon=True)
        self._thread.start()

    def set(self, faults: Faults) -> None:
        self._checked(faults)
        self._call(lambda: self._listener.change(faults))
        self._faults = faults

    def stats(self) -> ProxyStats:
        if not self._thread.is_alive():
            return self._listener.stats()
        return self._call(self._listener.stats)

    def close(self) -> None:
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # it ended in between
                self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_ANSWER_SECONDS_MAX)
            if self._thread.is_alive():
                raise TimeoutError("the proxy's thread does not end")
        failure, self._failure = self._failure, None
        if failure is not None:
            raise RuntimeError("the proxy failed by an error of its own") from failure

    def _checked(self, faults: Faults) -> Faults:
        if faults.http_error_rate and not self._http:
            raise InvalidSetting("http_error_rate needs a proxy with http=True")
        return faults

    def _run(self) -> None:
        try:
            self._loop.call_soon(self._listener.start)
            self._loop.run_forever()
        finally:
            self._listener.close()
            self._loop.close()

    def _failed(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._failure = context.get("exception") or RuntimeError(context["message"])

    def _call(self, function: Callable[[], _T]) -> _T:
        """Calls it in the loop's thread."""
        done: concurrent.futures.Future[_T] = concurrent.futures.Future()

        def run() -> None:
            try:
                done.set_result(function())
            except BaseException as error:
                done.set_exception(error)
                raise

        self._loop.call_soon_threadsafe(run)
        return done.result(_ANSWER_SECONDS_MAX)


class ProxyProcess(_Proxy):
    """A proxy in a process of its own, with the arguments of `FaultProxy`."""

    def __init__(
        self,
        upstream: str,
        *,
        http: bool = False,
        faults: Faults | None = None,
        seed: int = 0,
        listen: str = "127.0.0.1:0",
    ) -> None:
        self._faults = Faults()
        self.host = listen.rpartition(":")[0]
        command = [sys.executable, "-m", _MODULE]
        command += ["--listen", listen, "--upstream", upstream, "--seed", str(seed)]
        self._process = subprocess.Popen(
            [*command, *(["--http"] if http else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=TESTS,
        )
        self._lock = threading.Lock()
        self._unread = bytearray()
        self._last_stats = ProxyStats()
        try:
            self.port = int(self._line())
            if faults is not None:
                self.set(faults)
        except BaseException:
            self._end()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def set(self, faults: Faults) -> None:
        self._ask({"set": dataclasses.asdict(faults)})
        self._faults = faults

    def stats(self) -> ProxyStats:
        if self._process.returncode is None:
            self._last_stats = ProxyStats(**self._ask({"stats": True})["stats"])
        return self._last_stats

    def close(self) -> None:
        """Ends the process; `stats` then returns what was counted last."""
        if self._process.returncode is None:
            try:
                self.stats()
            finally:
                self._end()

    def _end(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_ANSWER_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _ask(self, question: dict[str, object]) -> dict[str, Any]:
        assert self._process.stdin is not None
        with self._lock:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
            answer: dict[str, Any] = json.loads(self._line())
        if "error" in answer:
            raise InvalidSetting(answer["error"])
        return answer

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        deadline = time.monotonic() + _ANSWER_SECONDS_MAX
        while b"\n" not in self._unread:
            ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError("the proxy's process does not answer")
            part = os.read(pipe, 65536)
            if not part:
                raise ConnectionError("the proxy's process ended")
            self._unread += part
        line, _, rest = bytes(self._unread).partition(b"\n")
        self._unread[:] = rest
        return line


class _Listener:
    """Accepts connections, gives each to a relay, and ends them all.

    Called in the loop's thread only, except for its constructor.
    """

    def __init__(
        self, traffic: Traffic, listening: socket.socket, upstream: Address, *, http: bool
    ) -> None:
        self._traffic = traffic
        self._loop: asyncio.AbstractEventLoop = traffic.loop
        self._listening = listening
        self._upstream = upstream
        self._relay = HttpConnection if http else Connection
        self._open: set[Connection] = set()
        self._retry: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._retry = None
        self._loop.add_reader(self._listening, self._accept)

    def change(self, faults: Faults) -> None:
        if faults.bytes_per_second != self._traffic.faults.bytes_per_second:
            self._traffic.up.free_at = self._traffic.down.free_at = 0.0
        self._traffic.faults = faults
        for connection in list(self._open):
            connection.faults_changed()

    def close(self) -> None:
        """Ends everything; the clients see a reset or an end."""
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._listening)
        self._listening.close()
        for connection in list(self._open):
            connection.reset()

    def stats(self) -> ProxyStats:
        traffic = self._traffic
        return ProxyStats(
            connections=traffic.connections,
            connections_open=len(self._open),
            bytes_up=traffic.bytes_up,
            bytes_down=traffic.bytes_down,
            requests=dict(traffic.methods),
            faults=dict(traffic.injected),
            failures=dict(traffic.failures),
        )

    def _accept(self) -> None:
        try:
            client, _ = self._listening.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError:
            # No more descriptors: the connection waits in the backlog, and others may end.
            self._traffic.failures["over_limit"] += 1
            self._loop.remove_reader(self._listening)
            self._retry = self._loop.call_later(_ACCEPT_RETRY_SECONDS, self.start)
            return
        self._traffic.connections += 1
        if self._traffic.faults.refuse:
            self._traffic.injected["refused"] += 1
            reset_socket(client)
        elif len(self._open) >= _CONNECTIONS_MAX:
            self._traffic.failures["over_limit"] += 1
            reset_socket(client)
        else:
            self._begin(client)

    def _begin(self, client: socket.socket) -> None:
        try:
            connection = self._relay(self._traffic, client, self._upstream, self._open.discard)
        except OSError:
            self._traffic.failures["over_limit"] += 1
            reset_socket(client)
            return
        self._open.add(connection)
        connection.start()


def _resolved(address: str) -> Address:
    """The address to bind or connect to; IPv4 if a name has both."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal():
        raise InvalidSetting(f"{address!r} is no host:port")
    found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    family, _, _, _, where = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return family, where


# ---- the process ----


def _answer(proxy: FaultProxy, line: str) -> dict[str, Any]:
    try:
        match json.loads(line):
            case {"set": dict(fields)}:
                proxy.set(Faults(**fields))
                return {"ok": True}
            case {"stats": True}:
                return {"stats": dataclasses.asdict(proxy.stats())}
    except (ValueError, TypeError) as error:
        return {"error": str(error)}
    return {"error": "neither set nor stats"}


def _arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python -m {_MODULE}", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--listen", default="127.0.0.1:0", metavar="HOST:PORT")
    parser.add_argument("--upstream", required=True, metavar="HOST:PORT")
    parser.add_argument("--http", action="store_true", help="speak HTTP/1.1: count requests")
    parser.add_argument("--seed", type=int, default=0)
    for each in dataclasses.fields(Faults):
        flag = f"--{each.name.replace('_', '-')}"
        if isinstance(each.default, bool):
            parser.add_argument(flag, action="store_true")
        else:
            parser.add_argument(flag, type=type(each.default), default=each.default)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Runs a proxy until the standard input ends."""
    given = _arguments(arguments)
    faults = Faults(**{each.name: getattr(given, each.name) for each in dataclasses.fields(Faults)})
    proxy = FaultProxy(
        given.upstream, http=given.http, faults=faults, seed=given.seed, listen=given.listen
    )
    with proxy, contextlib.suppress(KeyboardInterrupt):
        sys.stdout.write(f"{proxy.port}\n")
        sys.stdout.flush()
        for line in sys.stdin:
            sys.stdout.write(json.dumps(_answer(proxy, line)) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
