"""What only etcd's catalog can get wrong: the network, log-in, TLS, restarts, and forks."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from forebay.catalog import etcd_pb2 as pb
from forebay.catalog.catalog import Catalog
from forebay.catalog.connect import connect_kv
from forebay.catalog.etcd import Cluster, EtcdKv
from forebay.catalog.kv import ABSENT, Compare, Put
from forebay.errors import (
    InvalidSetting,
    LogClosed,
    ServiceError,
    ServiceRefused,
    ServiceUnavailable,
    TopicFenced,
)
from forebay.format.names import TopicName
from forebay.settings import MetadataSettings
from support.disks import in_thread, wait_until
from support.etcd_server import Certificates, EtcdServer, make_certificates
from support.kv_stores import (
    PATIENCE_SECONDS,
    Backend,
    Watcher,
    etcd_backend,
    grant_with,
)
from support.s3_server import refusing_port

pytestmark = pytest.mark.timeout(300)

PASSWORD = "correct horse 7351"  # of a server that lives as long as a test


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EtcdServer]:
    """A server that the test may stop."""
    server = EtcdServer(tmp_path / "etcd").start()
    yield server
    server.stop()


@pytest.fixture
def backend(server: EtcdServer) -> Iterator[Backend]:
    backend = etcd_backend(server)
    yield backend
    backend.kv.close()


def chain(error: BaseException) -> str:
    """Everything that a log could show of an error."""
    texts = []
    found: BaseException | None = error
    while found is not None:
        texts += [str(found), repr(found)]
        found = found.__cause__ or found.__context__
    return "\n".join(texts)


# ---- endpoints ----


def test_the_settings_lead_to_etcd(etcd: EtcdServer) -> None:
    kv = connect_kv(MetadataSettings(backend="etcd", endpoints=[etcd.endpoint]), None)
    assert etcd.endpoint in kv.name
    assert kv.revision() >= 1
    kv.close()


def test_a_dead_endpoint_is_passed_over_by_reads_and_by_transactions(etcd: EtcdServer) -> None:
    with refusing_port() as port:
        dead = f"127.0.0.1:{port}"
        for number in range(3):
            writer = EtcdKv([dead, etcd.endpoint], timeout_seconds=PATIENCE_SECONDS)
            assert writer.commit([], [Put("/dead-first", b"%d" % number)]) is not None
            writer.close()
            reader = EtcdKv([dead, f"http://{etcd.endpoint}/"], timeout_seconds=PATIENCE_SECONDS)
            entry = reader.get("/dead-first")
            assert entry is not None
            assert entry.value == b"%d" % number
            assert reader.keep_alive(reader.grant(600)) == 600
            reader.close()


def test_a_name_that_does_not_resolve_is_passed_over(etcd: EtcdServer) -> None:
    endpoints = ["no-such-host.invalid:2379", f"localhost:{etcd.port}"]
    kv = EtcdKv(endpoints, timeout_seconds=PATIENCE_SECONDS)
    assert kv.revision() >= 1
    kv.close()


def test_no_server_is_unavailable_within_the_time() -> None:
    with refusing_port() as port:
        kv = EtcdKv([f"127.0.0.1:{port}"], timeout_seconds=0.3)
        for ask in (
            lambda: kv.get("a"),
            lambda: kv.commit([], [Put("a", b"")]),
            lambda: kv.grant(1),
            lambda: kv.keep_alive(1),
        ):
            with pytest.raises(ServiceUnavailable, match=f"127.0.0.1:{port}"):
                ask()
        kv.close()


def test_a_server_that_does_not_answer_is_unavailable_within_the_time() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        kv = EtcdKv([f"127.0.0.1:{silent.getsockname()[1]}"], timeout_seconds=0.3)
        with pytest.raises(ServiceUnavailable):
            kv.get("a")
        with pytest.raises(ServiceUnavailable):
            kv.commit([], [Put("a", b"")])
        kv.close()


@pytest.mark.parametrize(
    "wrong",
    [
        {"endpoints": ["http://user:secret-word@127.0.0.1:2379"]},
        {"endpoints": []},
        {"username": "root"},
        {"password": "secret-word"},
        {"key_file": Path("secret-word")},
        {"ca_file": Path("/no/such/file.pem")},
    ],
)
def test_settings_that_cannot_work_are_refused(wrong: dict[str, object]) -> None:
    settings: dict[str, object] = {"endpoints": ["127.0.0.1:2379"], **wrong}
    with pytest.raises(InvalidSetting) as refused:
        EtcdKv(**settings)  # type: ignore[arg-type]  # wrong on purpose
    assert "secret-word" not in chain(refused.value)


# ---- restarts ----


def test_a_read_waits_for_a_server_that_comes_back(server: EtcdServer, backend: Backend) -> None:
    backend.put("a", b"1")
    server.stop(kill=True)
    patient = EtcdKv([server.endpoint], timeout_seconds=PATIENCE_SECONDS)
    patient_value: list[object] = []
    reading = threading.Thread(target=lambda: patient_value.append(patient.get(backend.key("a"))))
    reading.start()
    server.start()
    reading.join(PATIENCE_SECONDS)
    (entry,) = patient_value
    assert entry == backend.kv.get(backend.key("a"))
    assert backend.value("a") == b"1"
    patient.close()


def test_a_connection_that_a_restart_broke_is_made_again(
    server: EtcdServer, backend: Backend
) -> None:
    for number in range(3):
        backend.put("a", b"%d" % number)
        server.restart()
        assert backend.value("a") == b"%d" % number


def test_a_transaction_without_an_answer_may_have_happened_and_is_not_repeated(
    server: EtcdServer, backend: Backend
) -> None:
    """Writers go on through restarts. What was acknowledged is there, nothing twice."""
    stop = threading.Event()
    acknowledged: list[int] = []
    unknown: list[int] = []

    def write() -> None:
        number = 0
        while not stop.is_set():
            key = backend.key(f"{number:06}")
            try:
                if backend.kv.commit([Compare(key, ABSENT)], [Put(key, b"")]) is not None:
                    acknowledged.append(number)
                else:
                    unknown.append(-1)  # it was there already: somebody asked twice
            except ServiceUnavailable:
                unknown.append(number)
            number += 1

    writer = threading.Thread(target=write)
    writer.start()
    for _ in range(3):
        count = len(acknowledged)
        wait_until(lambda count=count: len(acknowledged) > count + 20)  # type: ignore[misc]
        server.restart()
    stop.set()
    writer.join(PATIENCE_SECONDS)
    assert -1 not in unknown
    found = {
        int(entry.key[-6:])
        for entry in backend.kv.range(backend.prefix, backend.end, limit=1_000_000)
    }
    assert set(acknowledged) <= found <= {*acknowledged, *unknown}


def test_a_watch_survives_restarts_and_neither_loses_nor_repeats(
    server: EtcdServer, backend: Backend
) -> None:
    start = backend.kv.revision()
    watcher = Watcher(backend.kv.watch(backend.prefix, backend.end, after=start))
    revisions = []
    for _ in range(3):
        revisions += [backend.put("a", b"x") for _ in range(10)]
        watcher.wait_for(len(revisions) - 5)
        server.restart()
        wait_until(lambda: backend.value("a") == b"x")
        revisions += [backend.put("a", b"x") for _ in range(10)]
    watcher.wait_for(len(revisions))
    watcher.close()
    assert [change.revision for change in watcher.seen] == revisions
    assert watcher.error is None


def test_a_watch_from_before_a_compaction_says_so(server: EtcdServer, backend: Backend) -> None:
    first = backend.put("a", b"1")
    last = [backend.put("a", b"2") for _ in range(5)][-1]
    server.control("compaction", str(last))
    with pytest.raises(ServiceError, match=f"after revision {first} "):
        next(iter(backend.kv.watch(backend.prefix, backend.end, after=first)))
    watch = backend.kv.watch(backend.prefix, backend.end, after=last)
    newer = backend.put("a", b"3")
    assert next(iter(watch)).revision == newer
    watch.close()


@pytest.mark.parametrize("began", ["before", "after"])
def test_a_watch_can_be_closed_while_the_server_is_away(server: EtcdServer, began: str) -> None:
    """`Watcher.close` fails if the watch does not end; no other time limit is involved.

    The watch lost its stream when the server went away, or never had one.
    """
    kv = EtcdKv([server.endpoint], timeout_seconds=PATIENCE_SECONDS)
    watch = kv.watch("/a", "/b", after=kv.revision())
    if began == "before":
        watcher = Watcher(watch)
        kv.commit([], [Put("/a", b"1")])
        watcher.wait_for(1)
        server.stop(kill=True)
    else:
        server.stop(kill=True)
        watcher = Watcher(watch)
    watcher.close()
    assert watcher.error is None
    kv.close()


def test_a_lease_lives_or_is_gone_after_the_server_was_away_and_never_between(
    server: EtcdServer,
) -> None:
    before = EtcdKv([server.endpoint], timeout_seconds=PATIENCE_SECONDS)
    lease, _ = grant_with(before, 1, {"/owner": b"me"})
    before.close()
    server.stop(kill=True)
    kv = EtcdKv([server.endpoint], timeout_seconds=0.3)
    for _ in range(4):  # together over a second, which is longer than the lease
        with pytest.raises(ServiceUnavailable):
            kv.keep_alive(lease)
    server.start()
    patient = EtcdKv([server.endpoint], timeout_seconds=PATIENCE_SECONDS)
    wait_until(lambda: patient.get("/owner") is None)  # a restart gives leases their time anew
    with pytest.raises(TopicFenced):
        patient.keep_alive(lease)
    with pytest.raises(TopicFenced):
        patient.commit([], [Put("/owner", b"me again", lease)])
    assert patient.get("/owner") is None
    patient.close()
    kv.close()


# ---- log-in ----


@pytest.fixture
def guarded(server: EtcdServer) -> EtcdServer:
    server.switch_auth_on(PASSWORD)
    return server


def logged_in(server: EtcdServer, username: str = "root") -> EtcdKv:
    return EtcdKv(
        [server.endpoint], username=username, password=PASSWORD, timeout_seconds=PATIENCE_SECONDS
    )


def test_the_right_password_opens_everything(guarded: EtcdServer) -> None:
    kv = logged_in(guarded)
    start = kv.revision()
    assert kv.commit([], [Put("/a", b"1")]) is not None
    assert kv.keep_alive(kv.grant(600)) == 600
    watch = kv.watch("/a", "/b", after=start)
    assert next(iter(watch)).value == b"1"
    watch.close()
    kv.close()


def test_a_token_that_the_server_forgot_is_renewed(guarded: EtcdServer) -> None:
    kv = logged_in(guarded)
    watcher = Watcher(kv.watch("/a", "/b", after=kv.revision()))
    first = kv.commit([], [Put("/a", b"1")])
    assert first is not None
    watcher.wait_for(1)
    guarded.restart()  # which forgets all tokens
    assert kv.get("/a") is not None
    guarded.restart()

    def written() -> bool:
        """The transaction is refused for its token first. It may also meet a broken connection."""
        try:
            kv.commit([Compare("/a", first)], [Put("/a", b"2")])
        except ServiceUnavailable:
            return False
        return True

    wait_until(written)
    assert [change.value for change in watcher.wait_for(2)] == [b"1", b"2"]
    watcher.close()
    kv.close()


@pytest.mark.parametrize(
    ("username", "password"), [("root", "wrong word 99"), ("nobody", PASSWORD), (None, None)]
)
def test_a_wrong_log_in_is_refused_and_the_password_is_not_shown(
    guarded: EtcdServer, username: str | None, password: str | None
) -> None:
    kv = EtcdKv(
        [guarded.endpoint], username=username, password=password, timeout_seconds=PATIENCE_SECONDS
    )
    for ask in (lambda: kv.get("/a"), lambda: kv.commit([], [Put("/a", b"")])):
        with pytest.raises(ServiceRefused) as refused:
            ask()
        assert str(password) not in chain(refused.value).replace("None", "")
    kv.close()


def test_what_the_user_may_not_do_is_refused(guarded: EtcdServer) -> None:
    kv = logged_in(guarded, "reader")
    assert kv.get("/open/a") is None
    for ask in (
        lambda: kv.get("/closed/a"),
        lambda: kv.commit([], [Put("/open/a", b"")]),
        lambda: next(iter(kv.watch("/closed/", "/closed0", after=0))),
    ):
        with pytest.raises(ServiceRefused, match="permission"):
            ask()
    kv.close()


def test_a_log_in_to_a_server_without_users_goes_through(server: EtcdServer) -> None:
    kv = logged_in(server)
    assert kv.commit([], [Put("/a", b"")]) is not None
    kv.close()


def test_secrets_are_in_no_name_and_no_repr() -> None:
    cluster = Cluster(("127.0.0.1:1",), username="root", password=PASSWORD)
    kv = EtcdKv(cluster.endpoints, username="root", password=PASSWORD, timeout_seconds=0.1)
    with pytest.raises(ServiceUnavailable) as unavailable:
        kv.get("/a")
    shown = f"{kv!r} {kv.name} {cluster!r} {chain(unavailable.value)}"
    assert PASSWORD not in shown
    kv.close()


# ---- TLS ----


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture
def encrypted(tmp_path: Path, certificates: Certificates) -> Iterator[EtcdServer]:
    server = EtcdServer(tmp_path / "tls-etcd", certificates).start()
    yield server
    server.stop()


def test_tls_with_a_certificate_on_both_sides(
    encrypted: EtcdServer, certificates: Certificates
) -> None:
    settings = MetadataSettings(
        backend="etcd",
        endpoints=[encrypted.endpoint],
        ca_file=certificates.ca_file,
        cert_file=certificates.cert_file,
        key_file=certificates.key_file,
    )
    kv = connect_kv(settings, None)
    assert kv.commit([], [Put("/a", b"1")]) is not None
    entry = kv.get("/a")
    assert entry is not None
    assert entry.value == b"1"
    kv.close()


def test_a_server_of_another_authority_is_refused(
    encrypted: EtcdServer, certificates: Certificates, tmp_path: Path
) -> None:
    foreign = make_certificates(tmp_path / "foreign")
    kv = EtcdKv(
        [encrypted.endpoint],
        ca_file=foreign.ca_file,
        cert_file=certificates.cert_file,
        key_file=certificates.key_file,
        timeout_seconds=PATIENCE_SECONDS,
    )
    with pytest.raises(ServiceRefused, match="certificate"):
        kv.get("/a")
    kv.close()


def test_a_client_without_a_certificate_gets_nowhere(
    encrypted: EtcdServer, certificates: Certificates
) -> None:
    kv = EtcdKv([encrypted.endpoint], ca_file=certificates.ca_file, timeout_seconds=0.5)
    with pytest.raises(ServiceError):
        kv.get("/a")
    kv.close()
    plain = EtcdKv([encrypted.endpoint], timeout_seconds=0.5)
    with pytest.raises(ServiceUnavailable):
        plain.get("/a")
    plain.close()


# ---- forks and imports ----


def test_a_forked_child_is_refused_and_its_parent_goes_on(etcd: EtcdServer) -> None:
    program = """
import os, signal, sys
from forebay.catalog.etcd import EtcdKv
from forebay.catalog.kv import Put
from forebay.errors import LogClosed
kv = EtcdKv([sys.argv[1]])
kv.commit([], [Put("/fork/parent", b"1")])
child = os.fork()
if child == 0:
    signal.alarm(100)
    try:
        kv.get("/fork/parent")
    except LogClosed as error:
        os._exit(7 if "after forking" in str(error) else 8)
    finally:
        os._exit(9)
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status), kv.get("/fork/parent").value)
kv.close()
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, etcd.endpoint],
        check=False,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.stdout == "7 b'1'\n", done.stderr


def test_a_request_that_runs_when_the_catalog_is_closed_says_so(server: EtcdServer) -> None:
    kv = EtcdKv([server.endpoint], timeout_seconds=200)
    kv.revision()
    server.stop(kill=True)
    errors: list[BaseException] = []

    def read() -> None:
        try:
            kv.get("/a")
        except LogClosed as error:
            errors.append(error)

    reading = threading.Thread(target=read)
    reading.start()
    kv.close()
    reading.join(PATIENCE_SECONDS)
    assert len(errors) == 1


def test_threads_that_ask_when_the_catalog_is_closed_are_all_told_so(etcd: EtcdServer) -> None:
    """Whether a request was sent before the catalog was closed, at that moment, or after it."""
    for _ in range(10):
        kv = EtcdKv([etcd.endpoint], timeout_seconds=PATIENCE_SECONDS)
        kv.revision()
        asking = [in_thread(lambda kv=kv: ask_until_closed(kv)) for _ in range(4)]  # type: ignore[misc]
        kv.close()
        assert [each.result(PATIENCE_SECONDS) for each in asking] == [True] * 4


def ask_until_closed(kv: EtcdKv) -> bool:
    while True:
        try:
            kv.get("/a")
        except LogClosed:
            return True


def test_no_request_makes_etcd_sort_a_range_because_it_would_read_all_of_it() -> None:
    """etcd applies the limit of a range after it has sorted it, whichever way it sorts."""
    orders: list[tuple[int, int]] = []

    def answer(request: pb.RangeRequest, _context: object) -> pb.RangeResponse:
        orders.append((request.limit, request.sort_order))  # type: ignore[attr-defined]
        return pb.RangeResponse()

    handler = grpc.unary_unary_rpc_method_handler(
        answer,
        request_deserializer=pb.RangeRequest.FromString,
        response_serializer=pb.RangeResponse.SerializeToString,
    )
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("etcdserverpb.KV", {"Range": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    catalog = Catalog(connect_kv(MetadataSettings("etcd", endpoints=(f"127.0.0.1:{port}",)), None))
    try:
        assert catalog.get_object_descriptors_range(TopicName("default", "t"), 5, limit=7) == []
    finally:
        catalog.close()
        server.stop(None)
    assert {limit for limit, _ in orders} >= {1, 7}
    assert {order for _, order in orders} == {0}
