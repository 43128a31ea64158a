"""What every `Kv` promises: SQLite's, etcd's, and the wrappers around them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from disks import wait_until
from forebay.catalog.kv import ABSENT, Change, Compare, Entry, Kv, Put, Remove
from forebay.errors import LogClosed, TopicFenced, UsageError
from forebay.limits import CATALOG_OPERATIONS_MAX, CATALOG_VALUE_BYTES_MAX
from kv_grounds import (
    GROUNDS,
    Ground,
    Watcher,
    etcd_ground,
    increment,
    start_increments,
)


@pytest.fixture(params=[*GROUNDS, "etcd"])
def ground(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ground]:
    if request.param == "etcd":
        ground = etcd_ground(request.getfixturevalue("etcd"))
    else:
        ground = GROUNDS[request.param](tmp_path)
    yield ground
    ground.kv.close()


# ---- keys and revisions ----


def test_a_key_that_was_never_put_is_not_there(ground: Ground) -> None:
    assert ground.kv.get(ground.key("a")) is None
    assert ground.names() == []


def test_a_put_is_read_back_with_its_revision(ground: Ground) -> None:
    revision = ground.put("a", b"\0one\xff")
    assert ground.kv.get(ground.key("a")) == Entry(ground.key("a"), b"\0one\xff", revision)


def test_an_empty_value_is_a_value(ground: Ground) -> None:
    ground.put("a", b"")
    assert ground.value("a") == b""


def test_every_write_has_a_greater_revision(ground: Ground) -> None:
    revisions = [ground.kv.revision()]
    for value in (b"1", b"1", b"2"):
        revisions.append(ground.put("a", value))
        assert ground.kv.revision() == revisions[-1]
    ground.kv.commit([], [Remove(ground.key("a"))])
    revisions.extend([ground.kv.revision(), ground.put("a", b"3")])
    assert revisions == sorted(set(revisions))


def test_a_write_to_one_key_leaves_the_revision_of_another(ground: Ground) -> None:
    first = ground.put("a", b"1")
    ground.put("b", b"2")
    entry = ground.kv.get(ground.key("a"))
    assert entry is not None
    assert entry.revision == first


def test_a_removed_key_is_gone(ground: Ground) -> None:
    ground.put("a", b"1")
    assert ground.kv.commit([], [Remove(ground.key("a"))]) is not None
    assert ground.value("a") is None


def test_removing_what_is_not_there_is_no_error(ground: Ground) -> None:
    assert ground.kv.commit([], [Remove(ground.key("a"))]) is not None


# ---- ranges ----


def test_a_range_is_ordered_by_the_bytes_of_the_keys(ground: Ground) -> None:
    names = ["a", "B", "a/b", "a0", "é", "z", "\U0001f600", "￿", "aa", "\x01"]
    for name in names:
        ground.put(name, name.encode())
    assert ground.names() == sorted(names, key=str.encode)


def test_a_range_has_its_start_and_not_its_end(ground: Ground) -> None:
    for name in "abcd":
        ground.put(name, b"")
    found = ground.kv.range(ground.key("b"), ground.key("d"), limit=10)
    assert [entry.key for entry in found] == [ground.key("b"), ground.key("c")]


def test_a_limit_takes_the_first_or_the_last(ground: Ground) -> None:
    for name in "abcd":
        ground.put(name, name.encode())

    def values(*, descending: bool) -> list[bytes]:
        found = ground.kv.range(ground.prefix, ground.end, limit=2, descending=descending)
        return [entry.value for entry in found]

    assert values(descending=False) == [b"a", b"b"]
    assert values(descending=True) == [b"d", b"c"]


def test_a_range_whose_end_is_not_after_its_start_is_empty(ground: Ground) -> None:
    ground.put("a", b"")
    key = ground.key("a")
    assert ground.kv.range(key, key, limit=10) == []
    assert ground.kv.range(ground.end, ground.prefix, limit=10) == []
    assert ground.kv.range(key, "", limit=10) == []


def test_a_range_from_the_empty_key_starts_at_the_first(ground: Ground) -> None:
    ground.put("a", b"1")
    assert ground.key("a") in {e.key for e in ground.kv.range("", ground.end, limit=100_000)}


def test_a_limit_below_one_is_refused(ground: Ground) -> None:
    with pytest.raises(UsageError, match="limit"):
        ground.kv.range(ground.prefix, ground.end, limit=0)


# ---- transactions ----


def test_a_key_is_created_by_one_of_two(ground: Ground) -> None:
    key = ground.key("a")
    assert ground.kv.commit([Compare(key, ABSENT)], [Put(key, b"first")]) is not None
    assert ground.kv.commit([Compare(key, ABSENT)], [Put(key, b"second")]) is None
    assert ground.value("a") == b"first"


def test_a_write_that_compares_an_old_revision_does_nothing(ground: Ground) -> None:
    key = ground.key("a")
    old = ground.put("a", b"1")
    newer = ground.put("a", b"2")
    assert ground.kv.commit([Compare(key, old)], [Put(key, b"3")]) is None
    assert ground.kv.commit([Compare(key, newer)], [Put(key, b"4")]) is not None
    assert ground.value("a") == b"4"


def test_a_key_that_was_removed_and_put_again_is_another(ground: Ground) -> None:
    key = ground.key("a")
    old = ground.put("a", b"1")
    ground.kv.commit([], [Remove(key)])
    assert ground.kv.commit([Compare(key, old)], [Put(key, b"2")]) is None
    ground.put("a", b"1")
    assert ground.kv.commit([Compare(key, old)], [Put(key, b"2")]) is None


def test_one_failed_comparison_of_several_stops_all_writes(ground: Ground) -> None:
    good = ground.put("a", b"1")
    ground.put("b", b"1")
    before = ground.kv.revision()
    done = ground.kv.commit(
        [Compare(ground.key("a"), good), Compare(ground.key("b"), good)],
        [Put(ground.key("a"), b"2"), Remove(ground.key("b")), Put(ground.key("c"), b"2")],
    )
    assert done is None
    assert [ground.value(name) for name in "abc"] == [b"1", b"1", None]
    assert ground.kv.revision() == before


def test_all_writes_of_a_transaction_have_one_revision(ground: Ground) -> None:
    ground.put("gone", b"")
    revision = ground.kv.commit(
        [], [Put(ground.key("a"), b"1"), Remove(ground.key("gone")), Put(ground.key("b"), b"2")]
    )
    found = ground.kv.range(ground.prefix, ground.end, limit=10)
    assert [(entry.value, entry.revision) for entry in found] == [
        (b"1", revision),
        (b"2", revision),
    ]


def test_a_transaction_without_writes_only_compares(ground: Ground) -> None:
    revision = ground.put("a", b"1")
    assert ground.kv.commit([Compare(ground.key("a"), revision)], []) == revision
    assert ground.kv.commit([Compare(ground.key("a"), ABSENT)], []) is None


def test_a_transaction_may_have_as_many_writes_as_the_limit_says(ground: Ground) -> None:
    def puts(count: int) -> list[Put | Remove]:
        return [Put(ground.key(f"{number:03}"), b"x") for number in range(count)]

    compares = [Compare(put.key, ABSENT) for put in puts(CATALOG_OPERATIONS_MAX)]
    assert ground.kv.commit(compares, puts(CATALOG_OPERATIONS_MAX)) is not None
    assert len(ground.names()) == CATALOG_OPERATIONS_MAX
    with pytest.raises(UsageError, match="101 writes"):
        ground.kv.commit([], puts(CATALOG_OPERATIONS_MAX + 1))


def test_the_largest_value_fits_and_a_larger_one_is_refused(ground: Ground) -> None:
    value = bytes(range(256)) * (CATALOG_VALUE_BYTES_MAX // 256)
    ground.put("a", value)
    assert ground.value("a") == value
    with pytest.raises(UsageError, match="at most"):
        ground.put("a", value + b"x")
    assert ground.value("a") == value


def test_a_transaction_over_the_size_of_a_request_is_refused_and_names_no_service(
    ground: Ground,
) -> None:
    puts = [Put(ground.key(name), bytes(CATALOG_VALUE_BYTES_MAX)) for name in "ab"]
    with pytest.raises(UsageError, match="transaction of 2"):
        ground.kv.commit([], puts)
    assert ground.names() == []


@pytest.mark.parametrize("key", ["", "a\0b", "\ud800", "k" * 3000])
def test_what_cannot_be_a_key_is_refused(ground: Ground, key: str) -> None:
    for ask in (
        lambda: ground.kv.get(key),
        lambda: ground.kv.commit([], [Put(key, b"")]),
        lambda: ground.kv.commit([Compare(key, ABSENT)], []),
    ):
        with pytest.raises(UsageError, match="key"):
            ask()


def test_writing_a_key_twice_in_one_transaction_is_refused(ground: Ground) -> None:
    key = ground.key("a")
    with pytest.raises(UsageError, match="twice"):
        ground.kv.commit([], [Put(key, b"1"), Remove(key)])


# ---- several at once ----


def test_threads_that_compare_and_set_lose_no_increment(ground: Ground) -> None:
    key = ground.key("counter")
    threads = [
        threading.Thread(target=increment, args=(ground.kv, key, 15), daemon=True) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ground.value("counter") == b"60"


def test_processes_that_compare_and_set_lose_no_increment(ground: Ground) -> None:
    if not ground.location:
        pytest.skip("another process cannot open it")
    key = ground.key("counter")
    process = start_increments(ground, key, 30)
    increment(ground.kv, key, 30)
    assert process.wait(60) == 0
    assert ground.value("counter") == b"60"


# ---- leases ----


def test_the_keys_of_a_lease_go_when_it_ends_and_not_before(ground: Ground) -> None:
    asked = time.monotonic()
    lease = ground.kv.grant(ground.ttl)
    assert lease != 0
    ground.put("free", b"1")
    ground.put("a", b"1", lease)
    ground.put("b", b"2", lease)
    entry = ground.kv.get(ground.key("a"))
    assert entry is not None
    assert entry.lease == lease
    if ground.boottime is not None:
        ground.pass_seconds(ground.ttl - 0.01)
        assert ground.names() == ["a", "b", "free"]
        ground.pass_seconds(0.01)
        assert ground.value("a") is None  # at once
    wait_until(lambda: ground.value("a") is None)
    assert ground.names() == ["free"]
    if ground.boottime is None:
        assert time.monotonic() - asked >= ground.ttl


def test_the_end_of_a_lease_is_a_change_of_its_keys(ground: Ground) -> None:
    lease = ground.kv.grant(ground.ttl)
    put = ground.put("a", b"1", lease)
    ground.pass_seconds(ground.ttl)
    wait_until(lambda: ground.value("a") is None)
    assert ground.kv.revision() > put
    key = ground.key("a")
    assert ground.kv.commit([Compare(key, put)], [Put(key, b"2")]) is None
    assert ground.kv.commit([Compare(key, ABSENT)], [Put(key, b"2")]) is not None


def test_a_lease_that_is_kept_alive_lives_on(ground: Ground) -> None:
    lease = ground.kv.grant(ground.ttl)
    ground.put("a", b"1", lease)
    for _ in range(4):
        ground.pass_seconds(ground.ttl * 0.4)
        assert ground.kv.keep_alive(lease) >= ground.ttl
    assert ground.value("a") == b"1"
    ground.kv.revoke(lease)


def test_a_revoked_lease_takes_its_keys_with_it(ground: Ground) -> None:
    lease, other = ground.kv.grant(60), ground.kv.grant(60)
    ground.put("a", b"1", lease)
    ground.put("b", b"2", other)
    ground.kv.revoke(lease)
    assert ground.names() == ["b"]
    ground.kv.revoke(lease)
    ground.kv.revoke(other)
    assert ground.names() == []


def test_a_lease_that_is_gone_cannot_be_kept_alive(ground: Ground) -> None:
    lease = ground.kv.grant(60)
    ground.kv.revoke(lease)
    with pytest.raises(TopicFenced):
        ground.kv.keep_alive(lease)


def test_a_lease_that_ended_by_itself_cannot_be_kept_alive(ground: Ground) -> None:
    lease = ground.kv.grant(ground.ttl)
    ground.put("a", b"", lease)
    ground.pass_seconds(ground.ttl)
    wait_until(lambda: ground.value("a") is None)
    with pytest.raises(TopicFenced):
        ground.kv.keep_alive(lease)


def test_a_put_with_a_lease_that_is_gone_writes_nothing(ground: Ground) -> None:
    lease = ground.kv.grant(60)
    ground.kv.revoke(lease)
    with pytest.raises(TopicFenced):
        ground.kv.commit([], [Put(ground.key("a"), b"1"), Put(ground.key("b"), b"1", lease)])
    assert ground.names() == []


def test_a_put_without_the_lease_frees_the_key_of_it(ground: Ground) -> None:
    lease = ground.kv.grant(60)
    ground.put("a", b"1", lease)
    ground.put("a", b"2")
    ground.kv.revoke(lease)
    assert ground.value("a") == b"2"


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf")])
def test_a_lease_of_no_time_is_refused(ground: Ground, seconds: float) -> None:
    with pytest.raises(UsageError, match="lease"):
        ground.kv.grant(seconds)


# ---- watches ----


def test_a_watch_tells_every_change_in_order(ground: Ground) -> None:
    before = ground.put("old", b"0")
    watcher = Watcher(ground.kv.watch(ground.prefix, ground.end, after=before))
    try:
        first = ground.put("a", b"1")
        second = ground.put("a", b"1")
        both = ground.kv.commit([], [Put(ground.key("b"), b"2"), Remove(ground.key("a"))])
        assert both is not None
        assert watcher.wait_for(4) == [
            Change(ground.key("a"), b"1", first),
            Change(ground.key("a"), b"1", second),
            Change(ground.key("b"), b"2", both),
            Change(ground.key("a"), None, both),
        ]
    finally:
        watcher.close()
    assert watcher.error is None


def test_a_watch_tells_what_happened_before_it_began(ground: Ground) -> None:
    start = ground.kv.revision()
    revisions = [ground.put("a", b"%d" % number) for number in range(200)]
    watcher = Watcher(ground.kv.watch(ground.prefix, ground.end, after=start))
    try:
        revisions += [ground.put("a", b"more") for _ in range(20)]
        seen = watcher.wait_for(len(revisions))
        assert [change.revision for change in seen] == revisions
    finally:
        watcher.close()


def test_a_watch_sees_its_own_range_only(ground: Ground) -> None:
    start = ground.kv.revision()
    watcher = Watcher(ground.kv.watch(ground.key("b"), ground.key("d"), after=start))
    try:
        for name in "abcde":
            ground.put(name, b"")
        last = ground.put("c", b"last")
        assert [change.key[-1] for change in watcher.wait_for(3)] == ["b", "c", "c"]
        assert watcher.seen[-1] == Change(ground.key("c"), b"last", last)
    finally:
        watcher.close()


def test_a_watch_sees_keys_go_with_their_lease(ground: Ground) -> None:
    lease = ground.kv.grant(ground.ttl)
    put = ground.put("a", b"1", lease)
    watcher = Watcher(ground.kv.watch(ground.prefix, ground.end, after=put))
    try:
        ground.pass_seconds(ground.ttl)
        (change,) = watcher.wait_for(1)
        assert (change.key, change.value) == (ground.key("a"), None)
        assert change.revision > put
    finally:
        watcher.close()


def test_a_watch_that_is_iterated_again_goes_on(ground: Ground) -> None:
    start = ground.kv.revision()
    for number in range(5):
        ground.put("a", b"%d" % number)
    watch = ground.kv.watch(ground.prefix, ground.end, after=start)
    seen = []
    for _ in range(5):
        for change in watch:
            seen.append(change.value)
            break
    watch.close()
    assert seen == [b"0", b"1", b"2", b"3", b"4"]


def test_closing_a_watch_ends_it_from_another_thread(ground: Ground) -> None:
    start = ground.kv.revision()
    watcher = Watcher(ground.kv.watch(ground.prefix, ground.end, after=start))
    ground.put("a", b"1")
    watcher.wait_for(1)
    watcher.close()
    assert watcher.error is None
    assert list(watcher.watch) == []


def test_closing_the_catalog_ends_its_watches(ground: Ground) -> None:
    start = ground.kv.revision()
    watcher = Watcher(ground.kv.watch(ground.prefix, ground.end, after=start))
    ground.put("a", b"1")
    watcher.wait_for(1)
    ground.kv.close()
    watcher.join()
    assert watcher.error is None


def test_a_watch_of_no_key_is_refused(ground: Ground) -> None:
    with pytest.raises(UsageError, match="watch"):
        ground.kv.watch(ground.end, ground.prefix, after=0)


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
def test_a_closed_catalog_says_so(ground: Ground, operation: str) -> None:
    ground.kv.revision()
    ground.kv.close()
    ground.kv.close()
    with pytest.raises(LogClosed, match="closed"):
        OPERATIONS[operation](ground.kv)


def test_a_catalog_has_a_name(ground: Ground) -> None:
    assert "catalog" in ground.kv.name
    assert ground.kv.name in repr(ground.kv)
