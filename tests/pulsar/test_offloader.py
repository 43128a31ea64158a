"""Offloading a ledger: what is in the store afterwards, and what is not after a failure."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Final

import pytest

from forebay.errors import (
    CorruptLog,
    InvalidSetting,
    LedgerError,
    MessageTooLarge,
    ObjectExists,
    ObjectMissing,
    ServiceUnavailable,
    UsageError,
)
from forebay.format.pulsar.blocks import Entry
from forebay.format.pulsar.index import decode_index
from forebay.limits import MIB
from forebay.objects.memory import MemoryBackend
from forebay.objects.store import CloudStore, connect
from forebay.pulsar.offloader import LedgerOffloader, OffloadSettings
from forebay.settings import CloudSettings
from forebay.testing import FaultBackend, ObjectFault
from support.ledgers import REAL_DATA, REAL_INDEX, HeldLedger, messages
from support.s3_server import S3Server

UID: Final = "7f0e0000-0000-4000-8000-00000000002a"
SMALL: Final = OffloadSettings(block_bytes=1024)
DATA: Final = f"pulsar/{UID}-ledger-7"
INDEX: Final = f"{DATA}-index"


class Places:
    """A store that can fail, and an offloader on it."""

    def __init__(self) -> None:
        self.backend = FaultBackend(MemoryBackend())
        self.store = CloudStore(self.backend)
        self.offloader = LedgerOffloader(self.store, SMALL, prefix="pulsar/")

    def keys(self) -> list[str]:
        self.backend.clear()
        return [meta.key for meta in self.store.list("")]


@pytest.fixture
def places() -> Places:
    return Places()


def read_all(offloader: LedgerOffloader, ledger_id: int = 7) -> list[bytes]:
    with offloader.read_offloaded(ledger_id, UID) as handle:
        return [bytes(entry.data) for entry in handle.read(0, handle.last_add_confirmed)]


def test_a_ledger_that_was_offloaded_is_read_again(places: Places) -> None:
    entries = messages(100)
    index = places.offloader.offload(HeldLedger(entries), UID)
    assert places.keys() == [DATA, INDEX]
    assert len(index.blocks) > 5
    assert read_all(places.offloader) == entries
    with places.offloader.read_offloaded(7, UID) as handle:
        assert handle.index == index
        assert (handle.ledger_id, handle.last_add_confirmed, handle.closed) == (7, 99, True)
        assert handle.length == sum(map(len, entries))
        assert handle.metadata.text("application") == "pulsar"


def test_the_objects_have_the_metadata_that_a_broker_demands(places: Places) -> None:
    name = "public/default/persistent/my-topic"
    places.offloader.offload(HeldLedger(messages(1)), UID, {"ManagedLedgerName": name})
    for key, role in ((DATA, "data"), (INDEX, "index")):
        assert places.store.head(key).metadata == {
            "s3managedledgeroffloaderformatversion": "1",
            "s3managedledgeroffloadersoftwareversion": "forebay",
            "role": role,
            "managedledgername": name,
        }


def test_metadata_that_are_not_ascii_are_escaped(places: Places) -> None:
    places.offloader.offload(HeldLedger(messages(1)), UID, {"Name": "bestellungen-für"})
    assert places.store.head(DATA).metadata["name"] == "bestellungen-f%C3%BCr"


def test_a_real_ledger_of_a_broker_is_read_and_offloaded_again(places: Places) -> None:
    version = {"s3managedledgeroffloaderformatversion": "1"}
    places.store.put_object(f"pulsar/{UID}-ledger-1", REAL_DATA, version)
    places.store.put_object(f"pulsar/{UID}-ledger-1-index", REAL_INDEX, version)
    other = str(uuid.UUID(int=2**127 + 5))
    with places.offloader.read_offloaded(1, UID) as handle:
        (entry,) = handle.read(0, 0)
        assert bytes(entry.data).endswith(b"hello-reader-1")
        places.offloader.offload(handle, other)
    copied = places.offloader.objects(1, other)
    for key, wanted in ((copied.data, REAL_DATA), (copied.index, REAL_INDEX)):
        assert bytes(places.store.get_range(key, 0, len(wanted))) == wanted
        assert places.store.head(key).size == len(wanted)


@pytest.mark.parametrize("ledger", [HeldLedger([]), HeldLedger(messages(2), closed=False)])
def test_an_empty_or_open_ledger_is_refused(places: Places, ledger: HeldLedger) -> None:
    with pytest.raises(UsageError, match="empty or open"):
        places.offloader.offload(ledger, UID)
    assert places.keys() == []


@pytest.mark.parametrize(
    ("operation", "key", "when"),
    [
        ("open_writer", DATA, "before"),
        ("write", DATA, "before"),
        ("complete", DATA, "before"),
        ("complete", DATA, "after"),
        ("put", INDEX, "before"),
        ("put", INDEX, "after"),
    ],
)
def test_after_a_failure_at_any_step_nothing_is_left(
    places: Places, operation: str, key: str, when: str
) -> None:
    fault = ObjectFault(operation, key=key, when=when)  # type: ignore[arg-type]
    places.backend.inject(fault)
    with pytest.raises(ServiceUnavailable):
        places.offloader.offload(HeldLedger(messages(100)), UID)
    assert places.keys() == []
    places.offloader.offload(HeldLedger(messages(100)), UID)
    assert read_all(places.offloader) == messages(100)


def test_a_failed_clean_up_leaves_no_index_without_data(places: Places) -> None:
    places.backend.inject(ObjectFault("put", key=INDEX, when="after"))
    places.backend.inject(ObjectFault("delete", key=INDEX))
    with pytest.raises(ServiceUnavailable):
        places.offloader.offload(HeldLedger(messages(9)), UID)
    assert places.keys() == [DATA, INDEX]
    places.offloader.delete_offloaded(7, UID)
    assert places.keys() == []


class Broken(HeldLedger):
    """A ledger that cannot be read to its end."""

    def read(self, first: int, last: int) -> Iterator[Entry]:
        yield from list(super().read(first, last))[:50]
        raise ServiceUnavailable("the bookie is away")


def out_of_order(entries: list[bytes]) -> HeldLedger:
    ledger = HeldLedger(entries)
    read = ledger.read
    ledger.read = lambda first, last: iter(  # type: ignore[method-assign]
        [entry._replace(entry_id=entry.entry_id * 2) for entry in read(first, last)]
    )
    return ledger


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: Broken(messages(100)), ServiceUnavailable, "bookie"),
        (lambda: HeldLedger(messages(60), promised=100), CorruptLog, "60 entries"),
        (lambda: out_of_order(messages(60)), CorruptLog, "entry 2 where 1"),
        (lambda: HeldLedger([*messages(60), bytes(900)]), MessageTooLarge, "entry 60 has 900"),
    ],
)
def test_a_ledger_that_cannot_be_copied_whole_leaves_nothing(
    places: Places, make: Callable[[], HeldLedger], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        places.offloader.offload(make(), UID)
    assert places.keys() == []


def test_an_attempt_of_the_same_name_is_not_touched(places: Places) -> None:
    places.offloader.offload(HeldLedger(messages(9)), UID)
    with pytest.raises(ObjectExists):
        places.offloader.offload(HeldLedger(messages(20)), UID)
    assert read_all(places.offloader) == messages(9)


def test_a_deleted_ledger_is_gone_and_may_be_deleted_again(places: Places) -> None:
    places.offloader.offload(HeldLedger(messages(9)), UID)
    places.offloader.delete_offloaded(7, UID)
    places.offloader.delete_offloaded(7, UID)
    assert places.keys() == []
    with pytest.raises(ObjectMissing):
        places.offloader.read_offloaded(7, UID)


@pytest.mark.parametrize("uid", ["x", UID.upper(), ""])
def test_a_ledger_is_named_by_a_uuid(places: Places, uid: str) -> None:
    with pytest.raises(UsageError):
        places.offloader.delete_offloaded(7, uid)


@pytest.mark.parametrize("size", [0, 1023, 2**31])
def test_blocks_have_sizes_that_pulsar_can_read(size: int) -> None:
    with pytest.raises(InvalidSetting, match="block_bytes"):
        OffloadSettings(block_bytes=size)


def test_the_number_of_parts_is_positive() -> None:
    with pytest.raises(InvalidSetting, match="parts"):
        OffloadSettings(parts=0)


# ---- on a real store ----


@pytest.fixture
def s3_store(s3: S3Server) -> Iterator[CloudStore]:
    store = connect(s3.settings())
    yield store
    store.close()


def test_small_blocks_are_refused_where_parts_have_a_least_size(s3_store: CloudStore) -> None:
    with pytest.raises(InvalidSetting, match="at least 5242880"):
        LedgerOffloader(s3_store, SMALL)


def test_a_ledger_of_several_parts_goes_through_a_real_store(s3_store: CloudStore) -> None:
    offloader = LedgerOffloader(s3_store, OffloadSettings(block_bytes=5 * MIB), prefix="pulsar/")
    entries = messages(300, 40_000)
    index = offloader.offload(HeldLedger(entries), UID, {"ManagedLedgerName": "a/b/c"})
    assert len(index.blocks) == 3
    objects = offloader.objects(7, UID)
    meta = s3_store.head(objects.index)
    assert meta.metadata["managedledgername"] == "a/b/c"
    assert decode_index(s3_store.get_object(objects.index, MIB)) == index
    assert read_all(offloader) == entries
    with offloader.read_offloaded(7, UID) as handle:
        assert [entry.entry_id for entry in handle.read(250, 252)] == [250, 251, 252]
    offloader.delete_offloaded(7, UID)
    assert list(s3_store.list("pulsar/")) == []


def test_an_object_without_the_version_is_refused_on_a_real_store(s3_store: CloudStore) -> None:
    offloader = LedgerOffloader(s3_store, OffloadSettings(block_bytes=5 * MIB), prefix="other/")
    objects = offloader.objects(7, UID)
    s3_store.put_object(objects.index, REAL_INDEX)
    with pytest.raises(LedgerError, match="format version None"):
        offloader.read_offloaded(7, UID)


def test_a_ledger_on_local_disk_keeps_its_version(tmp_path_factory: pytest.TempPathFactory) -> None:
    root = str(tmp_path_factory.mktemp("objects"))
    offloader = LedgerOffloader(connect(CloudSettings(backend="fs", root=root)), SMALL)
    offloader.offload(HeldLedger(messages(30)), UID)
    assert read_all(offloader) == messages(30)
