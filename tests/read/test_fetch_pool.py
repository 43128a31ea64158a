"""The threads that fetch: few, started when needed, and closing never waits for a request."""

from __future__ import annotations

import threading
import weakref

import pytest

from forebay.errors import LogClosed, ServiceUnavailable
from forebay.read.fetch_pool import FetchCancelled, FetchFuture, FetchPool
from support.disks import wait_until
from support.stored_objects import PATIENCE, Gate


def test_answers_and_errors_come_out_where_they_are_waited_for(pool: FetchPool) -> None:
    def fail() -> int:
        raise ServiceUnavailable("later")

    assert pool.submit(lambda: 7).result() == 7
    fetch = pool.submit(fail)
    with pytest.raises(ServiceUnavailable):
        fetch.result()
    assert fetch.failed
    assert not fetch.succeeded


def test_threads_start_as_they_are_needed_up_to_the_bound() -> None:
    pool, gate = FetchPool(3), Gate()
    assert pool.thread_count == 0
    fetches = [pool.submit(gate) for _ in range(10)]
    gate.arrived(3)
    assert pool.thread_count == 3
    names = {thread.name for thread in threading.enumerate()}
    assert {"forebay-fetch-0", "forebay-fetch-1", "forebay-fetch-2"} <= names
    gate.open()
    for fetch in fetches:
        fetch.result()
    assert pool.thread_count == 3
    pool.close()


def test_one_after_the_other_needs_one_thread() -> None:
    pool = FetchPool(3)
    for _ in range(5):
        pool.submit(lambda: None).result()
        wait_until(lambda: pool.idle_count == pool.thread_count)  # a result comes a bit earlier
    assert pool.thread_count == 1
    pool.close()


def test_a_cancelled_request_that_has_not_begun_never_runs() -> None:
    pool, gate = FetchPool(1), Gate()
    first = pool.submit(gate)
    gate.arrived(1)
    ran: list[int] = []
    second = pool.submit(lambda: ran.append(1))
    second.cancel()
    gate.open()
    first.result()
    pool.submit(lambda: None).result()
    assert ran == []
    with pytest.raises(FetchCancelled):
        second.result()
    pool.close()


def test_a_cancel_drops_the_answer_of_a_request_under_way() -> None:
    class Answer:
        pass

    answers: list[weakref.ref[Answer]] = []

    def job() -> Answer:
        fetch.cancel()
        answer = Answer()
        answers.append(weakref.ref(answer))
        return answer

    fetch: FetchFuture[Answer] = FetchFuture(job)
    fetch.run()
    assert [answer() for answer in answers] == [None]
    with pytest.raises(FetchCancelled):
        fetch.result()


def test_close_cancels_what_waits_and_does_not_wait_for_a_slow_request() -> None:
    pool, gate = FetchPool(1), Gate()
    running, waiting = pool.submit(gate), pool.submit(lambda: 1)
    gate.arrived(1)
    pool.close()
    with pytest.raises(FetchCancelled):
        waiting.result()
    assert not running.succeeded
    with pytest.raises(LogClosed):
        pool.submit(lambda: 1)
    gate.open()
    assert running.result() is None


def test_an_idle_thread_keeps_no_answer_alive(pool: FetchPool) -> None:
    class Answer:
        pass

    gone = threading.Event()
    answer = pool.submit(Answer).result()
    weakref.finalize(answer, gone.set)
    del answer
    assert gone.wait(PATIENCE)


def test_closing_ends_the_threads() -> None:
    before = set(threading.enumerate())
    pool = FetchPool(2)
    pool.submit(lambda: 1).result()
    started = set(threading.enumerate()) - before
    assert [thread.name for thread in started] == ["forebay-fetch-0"]
    pool.close()
    wait_until(lambda: not any(thread.is_alive() for thread in started))
