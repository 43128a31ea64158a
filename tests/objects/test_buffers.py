"""Buffers are used again, but never while a view of them is held."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from forebay.format.frame import scan
from forebay.limits import MIB
from forebay.objects.buffers import KEPT_MAX, BufferPool, return_free_memory
from forebay.objects.local import LocalBackend


def address(view: memoryview) -> int:
    """Which buffer a view is of."""
    assert isinstance(view.obj, bytearray)
    return id(view.obj)


def test_a_buffer_is_used_again_when_its_views_are_gone() -> None:
    pool = BufferPool()
    view = pool.take(MIB)
    first = address(view)
    del view
    assert address(pool.take(MIB)) == first
    assert address(pool.take(MIB // 2)) == first


HELD: dict[str, Callable[[memoryview], object]] = {
    "view": lambda view: view,
    "slice": lambda view: view[100:200],
    "read-only": lambda view: view.toreadonly()[5:],
    "cast": lambda view: view[:800].cast("Q"),
    "columns": lambda view: scan(view.toreadonly()),
}


@pytest.mark.parametrize("held", HELD)
def test_a_buffer_is_left_alone_while_anything_refers_to_it(held: str) -> None:
    pool = BufferPool()
    view = pool.take(MIB)
    first = address(view)
    holder = HELD[held](view)
    del view
    assert address(pool.take(MIB)) != first
    del holder
    assert first in {address(each) for each in [pool.take(MIB) for _ in range(KEPT_MAX)]}


def test_free_buffers_are_given_back_and_lent_ones_are_kept() -> None:
    pool = BufferPool()
    lent, free = pool.take(MIB), pool.take(MIB)
    lent[:4] = b"lent"
    del free
    return_free_memory()
    assert pool.kept == 1
    assert bytes(lent[:4]) == b"lent"
    first = address(lent)
    del lent
    assert address(pool.take(MIB)) == first


def test_no_more_than_a_few_are_kept() -> None:
    pool = BufferPool()
    views = [pool.take(MIB) for _ in range(3 * KEPT_MAX)]
    assert len({address(view) for view in views}) == 3 * KEPT_MAX
    del views
    assert pool.kept == KEPT_MAX


def test_a_larger_buffer_takes_the_place_of_one_that_is_too_small() -> None:
    pool = BufferPool()
    views = [pool.take(MIB) for _ in range(KEPT_MAX)]
    del views
    large = pool.take(4 * MIB)
    kept = address(large)
    del large
    assert address(pool.take(4 * MIB)) == kept


def test_ranges_that_are_held_keep_their_bytes_while_many_threads_read(tmp_path: Path) -> None:
    data = random.Random(1).randbytes(3 * MIB)
    backend = LocalBackend(tmp_path)
    backend.put_object("key", data)
    wrong: list[int] = []

    def read(seed: int) -> None:
        rng = random.Random(seed)
        held: list[tuple[int, int, object]] = []
        for _ in range(60):
            start = rng.randrange(2 * MIB)
            end = start + rng.randrange(300_000, MIB)
            held.append((start, end, backend.get_range("key", start, end)))
            if len(held) > rng.randrange(1, 6):
                first, last, view = held.pop(rng.randrange(len(held)))
                if bytes(view) != data[first:last]:  # type: ignore[call-overload]
                    wrong.append(first)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
