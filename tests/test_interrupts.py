"""Threads and locks for callers that may be interrupted: results, errors, and no thread left."""

from __future__ import annotations

import _thread
import threading
from pathlib import Path
from typing import NoReturn

import pytest

import forebay
from forebay.interrupts import WorkerThreads, give_up, held, holding, run_aside
from support.disks import PATIENCE_SECONDS, in_thread, wait_until


def no_threads(*_: object) -> NoReturn:
    raise RuntimeError("can't create new thread at interpreter shutdown")


def test_what_runs_aside_returns_its_result_or_raises_its_error() -> None:
    def fail() -> None:
        raise LookupError("there")

    assert run_aside(lambda: threading.current_thread().name) == "forebay-aside"
    with pytest.raises(LookupError, match="there"):
        run_aside(fail)


def test_what_runs_aside_runs_nested_work_on_the_same_thread() -> None:
    outer, inner = run_aside(lambda: (_thread.get_ident(), run_aside(_thread.get_ident)))
    assert outer == inner != _thread.get_ident()


def test_where_no_thread_can_be_started_the_caller_does_the_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As at the exit of the interpreter, from Python 3.12 on."""
    store = forebay.open(tmp_path)
    store.topic("orders").append(b"one")
    with monkeypatch.context() as patch:
        patch.setattr(_thread, "start_new_thread", no_threads)
        assert run_aside(_thread.get_ident) == _thread.get_ident()
        store.close()
    with forebay.open(tmp_path) as again:
        assert [message.payload for message in again.topic("orders").read()] == [b"one"]


def test_a_lock_is_free_after_whatever_was_done_with_it() -> None:
    lock = threading.RLock()

    def fail() -> None:
        assert held(lock)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        holding(lock, fail)
    assert not held(lock)
    assert in_thread(lambda: holding(lock, lambda: held(lock))).result(PATIENCE_SECONDS)
    give_up(lock)


def test_a_queue_without_a_thread_refuses_an_item_and_takes_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[str] = []

    def work() -> None:
        while (item := workers.get()) != "end":
            assert item is not None
            taken.append(item)

    workers: WorkerThreads[str] = WorkerThreads(1, "test", work)
    with monkeypatch.context() as patch:
        patch.setattr(_thread, "start_new_thread", no_threads)
        with pytest.raises(RuntimeError):
            workers.put("a")
    workers.put("b")
    wait_until(lambda: taken == ["a", "b"])
    workers.close("end")
    workers.join(PATIENCE_SECONDS)
    assert in_thread(workers.join).result(PATIENCE_SECONDS) is None
