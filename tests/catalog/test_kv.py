"""What every `Kv` promises: SQLite's, etcd's, and the wrappers around them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forebay.catalog.kv import ABSENT, Change, Compare, Entry, Kv, Put, Remove
from forebay.errors import LogClosed, TopicFenced, UsageError
from forebay.limits import CATALOG_OPERATIONS_MAX, CATALOG_VALUE_BYTES_MAX
from support.disks import wait_until
from support.kv_stores import (
    BACKENDS,
    Backend,
    Watcher,
    grant_with,
    increment,
    requested_backend,
    start_increments,
)


@pytest.fixture(params=[*BACKENDS, "etcd"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    backend = requested_backend(request, tmp_path)
    yield backend
    backend.kv.close()


# ---- keys and revisions ----


def test_a_key_that_was_never_put_is_not_there(backend: Backend) -> None:
    assert backend.kv.get(backend.key("a")) is None
    assert backend.names() == []


def test_a_put_is_read_back_with_its_revision(backend: Backend) -> None:
    revision = backend.put("a", b"\0one\xff")
    assert backend.kv.get(backend.key("a")) == Entry(backend.key("a"), b"\0one\xff", revision)


def test_an_empty_value_is_a_value(backend: Backend) -> None:
    backend.put("a", b"")
    assert backend.value("a") == b""


def test_every_write_has_a_greater_revision(backend: Backend) -> None:
    revisions = [backend.kv.revision()]
    for value in (b"1", b"1", b"2"):
        revisions.append(backend.put("a", value))
        assert backend.kv.revision() == revisions[-1]
    backend.kv.commit([], [Remove(backend.key("a"))])
    revisions.extend([backend.kv.revision(), backend.put("a", b"3")])
    assert revisions == sorted(set(revisions))


def test_a_write_to_one_key_leaves_the_revision_of_another(backend: Backend) -> None:
    first = backend.put("a", b"1")
    backend.put("b", b"2")
    entry = backend.kv.get(backend.key("a"))
    assert entry is not None
    assert entry.revision == first


def test_a_removed_key_is_gone(backend: Backend) -> None:
    backend.put("a", b"1")
    assert backend.kv.commit([], [Remove(backend.key("a"))]) is not None
    assert backend.value("a") is None


def test_removing_what_is_not_there_is_no_error(backend: Backend) -> None:
    assert backend.kv.commit([], [Remove(backend.key("a"))]) is not None


# ---- ranges ----


def test_a_range_is_ordered_by_the_bytes_of_the_keys(backend: Backend) -> None:
    names = ["a", "B", "a/b", "a0", "é", "z", "\U0001f600", "￿", "aa", "\x01"]
    for name in names:
        backend.put(name, name.encode())
    assert backend.names() == sorted(names, key=str.encode)


def test_a_range_has_its_start_and_not_its_end(backend: Backend) -> None:
    for name in "abcd":
        backend.put(name, b"")
    found = backend.kv.range(backend.key("b"), backend.key("d"), limit=10)
    assert [entry.key for entry in found] == [backend.key("b"), backend.key("c")]


def test_a_limit_takes_the_first_by_key(backend: Backend) -> None:
    for name in "dbca":
        backend.put(name, name.encode())
    found = backend.kv.range(backend.prefix, backend.end, limit=2)
    assert [entry.value for entry in found] == [b"a", b"b"]


def test_a_range_whose_end_is_not_after_its_start_is_empty(backend: Backend) -> None:
    backend.put("a", b"")
    key = backend.key("a")
    assert backend.kv.range(key, key, limit=10) == []
    assert backend.kv.range(backend.end, backend.prefix, limit=10) == []
    assert backend.kv.range(key, "", limit=10) == []


def test_a_range_from_the_empty_key_starts_at_the_first(backend: Backend) -> None:
    backend.put("a", b"1")
    assert backend.key("a") in {e.key for e in backend.kv.range("", backend.end, limit=100_000)}


def test_a_limit_below_one_is_refused(backend: Backend) -> None:
    with pytest.raises(UsageError, match="limit"):
        backend.kv.range(backend.prefix, backend.end, limit=0)


# ---- transactions ----


def test_a_key_is_created_by_one_of_two(backend: Backend) -> None:
    key = backend.key("a")
    assert backend.kv.commit([Compare(key, ABSENT)], [Put(key, b"first")]) is not None
    assert backend.kv.commit([Compare(key, ABSENT)], [Put(key, b"second")]) is None
    assert backend.value("a") == b"first"


def test_a_write_that_compares_an_old_revision_does_nothing(backend: Backend) -> None:
    key = backend.key("a")
    old = backend.put("a", b"1")
    newer = backend.put("a", b"2")
    assert backend.kv.commit([Compare(key, old)], [Put(key, b"3")]) is None
    assert backend.kv.commit([Compare(key, newer)], [Put(key, b"4")]) is not None
    assert backend.value("a") == b"4"


def test_a_key_that_was_removed_and_put_again_is_another(backend: Backend) -> None:
    key = backend.key("a")
    old = backend.put("a", b"1")
    backend.kv.commit([], [Remove(key)])
    assert backend.kv.commit([Compare(key, old)], [Put(key, b"2")]) is None
    backend.put("a", b"1")
    assert backend.kv.commit([Compare(key, old)], [Put(key, b"2")]) is None


def test_one_failed_comparison_of_several_stops_all_writes(backend: Backend) -> None:
    good = backend.put("a", b"1")
    backend.put("b", b"1")
    before = backend.kv.revision()
    done = backend.kv.commit(
        [Compare(backend.key("a"), good), Compare(backend.key("b"), good)],
        [Put(backend.key("a"), b"2"), Remove(backend.key("b")), Put(backend.key("c"), b"2")],
    )
    assert done is None
    assert [backend.value(name) for name in "abc"] == [b"1", b"1", None]
    assert backend.kv.revision() == before


def test_all_writes_of_a_transaction_have_one_revision(backend: Backend) -> None:
    backend.put("gone", b"")
    revision = backend.kv.commit(
        [], [Put(backend.key("a"), b"1"), Remove(backend.key("gone")), Put(backend.key("b"), b"2")]
    )
    found = backend.kv.range(backend.prefix, backend.end, limit=10)
    assert [(entry.value, entry.revision) for entry in found] == [
        (b"1", revision),
        (b"2", revision),
    ]


def test_a_transaction_without_writes_only_compares(backend: Backend) -> None:
    revision = backend.put("a", b"1")
    assert backend.kv.commit([Compare(backend.key("a"), revision)], []) == revision
    assert backend.kv.commit([Compare(backend.key("a"), ABSENT)], []) is None


def test_a_transaction_may_have_as_many_writes_as_the_limit_says(backend: Backend) -> None:
    def puts(count: int) -> list[Put | Remove]:
        return [Put(backend.key(f"{number:03}"), b"x") for number in range(count)]

    compares = [Compare(put.key, ABSENT) for put in puts(CATALOG_OPERATIONS_MAX)]
    assert backend.kv.commit(compares, puts(CATALOG_OPERATIONS_MAX)) is not None
    assert len(backend.names()) == CATALOG_OPERATIONS_MAX
    with pytest.raises(UsageError, match=f"{CATALOG_OPERATIONS_MAX + 1} writes"):
        backend.kv.commit([], puts(CATALOG_OPERATIONS_MAX + 1))


def test_the_largest_value_fits_and_a_larger_one_is_refused(backend: Backend) -> None:
    value = bytes(range(256)) * (CATALOG_VALUE_BYTES_MAX // 256)
    backend.put("a", value)
    assert backend.value("a") == value
    with pytest.raises(UsageError, match=str(CATALOG_VALUE_BYTES_MAX)):
        backend.put("a", value + b"x")
    assert backend.value("a") == value


def test_a_transaction_over_the_size_of_a_request_is_refused_and_names_no_service(
    backend: Backend,
) -> None:
    puts = [Put(backend.key(name), bytes(CATALOG_VALUE_BYTES_MAX)) for name in "ab"]
    with pytest.raises(UsageError):
        backend.kv.commit([], puts)
    assert backend.names() == []


@pytest.mark.parametrize("key", ["", "a\0b", "\ud800", "k" * 3000])
def test_what_cannot_be_a_key_is_refused(backend: Backend, key: str) -> None:
    for ask in (
        lambda: backend.kv.get(key),
        lambda: backend.kv.commit([], [Put(key, b"")]),
        lambda: backend.kv.commit([Compare(key, ABSENT)], []),
    ):
        with pytest.raises(UsageError, match="key"):
            ask()


def test_writing_a_key_twice_in_one_transaction_is_refused(backend: Backend) -> None:
    key = backend.key("a")
    with pytest.raises(UsageError, match="twice"):
        backend.kv.commit([], [Put(key, b"1"), Remove(key)])


# ---- several at once ----


def test_threads_that_compare_and_set_lose_no_increment(backend: Backend) -> None:
    key = backend.key("counter")
    threads = [
        threading.Thread(target=increment, args=(backend.kv, key, 15), daemon=True)
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert backend.value("counter") == b"60"


def test_processes_that_compare_and_set_lose_no_increment(backend: Backend) -> None:
    if not backend.location:
        pytest.skip("another process cannot open it")
    key = backend.key("counter")
    process = start_increments(backend, key, 30)
    increment(backend.kv, key, 30)
    assert process.wait(100) == 0
    assert backend.value("counter") == b"60"


# ---- leases ----


def test_the_keys_of_a_lease_go_when_it_ends_and_not_before(backend: Backend) -> None:
    backend.put("free", b"1")
    asked = time.monotonic()
    lease, _ = leased(backend, "a", "b")
    assert lease != 0
    if backend.boottime is not None:
        backend.pass_seconds(backend.ttl - 0.01)
        assert backend.names() == ["a", "b", "free"]
        backend.pass_seconds(0.01)
        assert backend.value("a") is None  # at once
    wait_until(lambda: backend.value("a") is None)
    assert backend.names() == ["free"]
    if backend.boottime is None:
        assert time.monotonic() - asked >= backend.ttl


def leased(backend: Backend, *names: str) -> tuple[int, int]:
    """A lease that has these keys, and the revision at which they were put."""
    return grant_with(backend.kv, backend.ttl, {backend.key(name): b"1" for name in names})


def test_the_end_of_a_lease_is_a_change_of_its_keys(backend: Backend) -> None:
    _, put = leased(backend, "a")
    backend.pass_seconds(backend.ttl)
    wait_until(lambda: backend.value("a") is None)
    assert backend.kv.revision() > put
    key = backend.key("a")
    assert backend.kv.commit([Compare(key, put)], [Put(key, b"2")]) is None
    assert backend.kv.commit([Compare(key, ABSENT)], [Put(key, b"2")]) is not None


def test_a_lease_that_is_kept_alive_lives_on(backend: Backend) -> None:
    """For longer than its time. A test that was held up itself tries again."""
    while (lease := kept_alive(backend)) is None:
        pass
    backend.kv.revoke(lease)


def kept_alive(backend: Backend) -> int | None:
    """A lease after four renewals; None if this process came too late for one of them."""
    lease, _ = leased(backend, "a")
    for _ in range(4):
        asked = time.monotonic()
        backend.pass_seconds(backend.ttl * 0.4)
        try:
            assert backend.kv.keep_alive(lease) >= backend.ttl
            assert backend.value("a") == b"1"
        except (TopicFenced, AssertionError):
            if backend.boottime is None and time.monotonic() - asked >= backend.ttl:
                return None
            raise
    return lease


def test_a_revoked_lease_takes_its_keys_with_it(backend: Backend) -> None:
    lease, other = backend.kv.grant(600), backend.kv.grant(600)
    backend.put("a", b"1", lease)
    backend.put("b", b"2", other)
    entry = backend.kv.get(backend.key("a"))
    assert entry is not None
    assert entry.lease == lease
    backend.kv.revoke(lease)
    assert backend.names() == ["b"]
    backend.kv.revoke(lease)
    backend.kv.revoke(other)
    assert backend.names() == []


def test_a_lease_that_is_gone_cannot_be_kept_alive(backend: Backend) -> None:
    lease = backend.kv.grant(600)
    backend.kv.revoke(lease)
    with pytest.raises(TopicFenced):
        backend.kv.keep_alive(lease)


def test_a_lease_that_ended_by_itself_cannot_be_kept_alive(backend: Backend) -> None:
    lease, _ = leased(backend, "a")
    backend.pass_seconds(backend.ttl)
    wait_until(lambda: backend.value("a") is None)
    with pytest.raises(TopicFenced):
        backend.kv.keep_alive(lease)


def test_a_put_with_a_lease_that_is_gone_writes_nothing(backend: Backend) -> None:
    lease = backend.kv.grant(600)
    backend.kv.revoke(lease)
    with pytest.raises(TopicFenced):
        backend.kv.commit([], [Put(backend.key("a"), b"1"), Put(backend.key("b"), b"1", lease)])
    assert backend.names() == []


def test_a_put_without_the_lease_frees_the_key_of_it(backend: Backend) -> None:
    lease = backend.kv.grant(600)
    backend.put("a", b"1", lease)
    backend.put("a", b"2")
    backend.kv.revoke(lease)
    assert backend.value("a") == b"2"


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf")])
def test_a_lease_of_no_time_is_refused(backend: Backend, seconds: float) -> None:
    with pytest.raises(UsageError, match="lease"):
        backend.kv.grant(seconds)


# ---- watches ----


def test_a_watch_tells_every_change_in_order(backend: Backend) -> None:
    before = backend.put("old", b"0")
    watcher = Watcher(backend.kv.watch(backend.prefix, backend.end, after=before))
    try:
        first = backend.put("a", b"1")
        second = backend.put("a", b"1")
        both = backend.kv.commit([], [Put(backend.key("b"), b"2"), Remove(backend.key("a"))])
        assert both is not None
        assert watcher.wait_for(4) == [
            Change(backend.key("a"), b"1", first),
            Change(backend.key("a"), b"1", second),
            Change(backend.key("b"), b"2", both),
            Change(backend.key("a"), None, both),
        ]
    finally:
        watcher.close()
    assert watcher.error is None


def test_a_watch_tells_what_happened_before_it_began(backend: Backend) -> None:
    start = backend.kv.revision()
    revisions = [backend.put("a", b"%d" % number) for number in range(200)]
    watcher = Watcher(backend.kv.watch(backend.prefix, backend.end, after=start))
    try:
        revisions += [backend.put("a", b"more") for _ in range(20)]
        seen = watcher.wait_for(len(revisions))
        assert [change.revision for change in seen] == revisions
    finally:
        watcher.close()


def test_a_watch_sees_its_own_range_only(backend: Backend) -> None:
    start = backend.kv.revision()
    watcher = Watcher(backend.kv.watch(backend.key("b"), backend.key("d"), after=start))
    try:
        for name in "abcde":
            backend.put(name, b"")
        last = backend.put("c", b"last")
        assert [change.key[-1] for change in watcher.wait_for(3)] == ["b", "c", "c"]
        assert watcher.seen[-1] == Change(backend.key("c"), b"last", last)
    finally:
        watcher.close()


def test_a_watch_sees_keys_go_with_their_lease(backend: Backend) -> None:
    _, put = leased(backend, "a")
    watcher = Watcher(backend.kv.watch(backend.prefix, backend.end, after=put))
    try:
        backend.pass_seconds(backend.ttl)
        (change,) = watcher.wait_for(1)
        assert (change.key, change.value) == (backend.key("a"), None)
        assert change.revision > put
    finally:
        watcher.close()


def test_a_watch_that_is_iterated_again_goes_on(backend: Backend) -> None:
    start = backend.kv.revision()
    for number in range(5):
        backend.put("a", b"%d" % number)
    watch = backend.kv.watch(backend.prefix, backend.end, after=start)
    seen = []
    for _ in range(5):
        for change in watch:
            seen.append(change.value)
            break
    watch.close()
    assert seen == [b"0", b"1", b"2", b"3", b"4"]


def test_closing_a_watch_ends_it_from_another_thread(backend: Backend) -> None:
    start = backend.kv.revision()
    watcher = Watcher(backend.kv.watch(backend.prefix, backend.end, after=start))
    backend.put("a", b"1")
    watcher.wait_for(1)
    watcher.close()
    assert watcher.error is None
    assert list(watcher.watch) == []


def test_closing_the_catalog_ends_its_watches(backend: Backend) -> None:
    start = backend.kv.revision()
    watcher = Watcher(backend.kv.watch(backend.prefix, backend.end, after=start))
    backend.put("a", b"1")
    watcher.wait_for(1)
    backend.kv.close()
    watcher.join()
    assert watcher.error is None


def test_a_watch_of_no_key_is_refused(backend: Backend) -> None:
    with pytest.raises(UsageError, match="watch"):
        backend.kv.watch(backend.end, backend.prefix, after=0)


# ---- the end ----

OPERATIONS: dict[str, Callable[[Kv], object]] = {
    "get": lambda kv: kv.get("a"),
    "range": lambda kv: kv.range("a", "b", limit=1),
    "commit": lambda kv: kv.commit([], [Put("a", b"")]),
    "watch": lambda kv: kv.watch("a", "b", after=0),
    "revision": lambda kv: kv.revision(),
    "grant": lambda kv: kv.grant(1),
    "keep_alive": lambda kv: kv.keep_alive(1),
    "revoke": lambda kv: kv.revoke(1),
}


@pytest.mark.parametrize("operation", sorted(OPERATIONS))
def test_a_closed_catalog_says_so(backend: Backend, operation: str) -> None:
    backend.kv.revision()
    backend.kv.close()
    backend.kv.close()
    with pytest.raises(LogClosed):
        OPERATIONS[operation](backend.kv)


def test_a_catalog_has_a_name(backend: Backend) -> None:
    assert "catalog" in backend.kv.name
    assert backend.kv.name in repr(backend.kv)
