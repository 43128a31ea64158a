"""`/v1/overview`: one document with everything that the page shows."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from forebay.admin.context import ServerContext
from forebay.admin.page.history import FIELDS
from forebay.admin.page.overview import Overviews, alerts
from forebay.admin.page.topic_states import TopicStates
from forebay.admin.page.watch import ProbeResult, StoreProbe
from forebay.catalog.catalog import Catalog
from forebay.catalog.kv import Remove
from forebay.catalog.sqlite import SqliteKv
from forebay.errors import ServiceUnavailable, UnknownTopic, UsageError
from forebay.format.names import parse_topic
from forebay.limits import KIB
from forebay.objects.memory import MemoryBackend
from forebay.objects.store import CloudStore
from forebay.settings import (
    CloudSettings,
    DeleterSettings,
    RemoteRetentionSettings,
    StoreSettings,
    UploaderSettings,
    WalSettings,
)
from forebay.testing import FaultKv
from forebay.topic.store import Store, Topic
from support.disks import wait_until
from support.holed_topics import END, HELD, accept, leave_a_wide_hole
from support.one_job import OneJob
from support.served import Served, served
from support.storages import storage_of

NAME = "/default/orders"


def settings_in(folder: Path) -> StoreSettings:
    return StoreSettings(
        folder,
        wal=WalSettings(rotate_max_bytes=16 * KIB, cache_capacity=64),
        uploader=UploaderSettings(enabled=False, max_object_bytes=32 * KIB),
        deleter=DeleterSettings(retention_size_mb=0, deletion_lag_minutes=0),
    )


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    with served(settings_in(tmp_path)) as found:
        yield found


def fill(topic: Topic, batches: int = 5) -> None:
    for _ in range(batches):
        topic.append_many([b"x" * 100] * 100, durability="synced")


def ask(server: Served, path: str = "/v1/overview") -> Any:
    """Once the server knows of all topics that are open."""
    names = server.store.topics()
    wait_until(lambda: server.context.watch.states.names() == names)
    return server.client.json("GET", path)


def tiers(spans: list[dict[str, Any]], tier: str) -> list[tuple[int, int]]:
    return [(each["start"], each["end"]) for each in spans if each["tier"] == tier]


def test_offsets_without_messages_count_nowhere_as_messages(tmp_path: Path) -> None:
    leave_a_wide_hole(tmp_path)
    with served(settings_in(tmp_path)) as server:
        server.store.topic(NAME)
        (row,) = ask(server)["topics"]
        assert row["sizes"]["messages"] == 2 * HELD
        assert row["sizes"]["lost_offsets"] + row["sizes"]["unknown_offsets"] == END - HELD
        assert row["unknown"][-1][1] == END
        assert row["lag"]["messages"] == HELD
        accept(tmp_path)
        wait_until(lambda: ask(server)["topics"][0]["accepted"] == [[HELD, END]])
        (row,) = ask(server)["topics"]
        assert (row["lost"], row["unknown"]) == ([], [])
        assert row["sizes"]["accepted_offsets"] == END - HELD
        assert row["sizes"]["messages"] == 2 * HELD


def test_it_tells_where_everything_is(server: Served) -> None:
    topic = server.store.topic(NAME)
    fill(topic)
    objects = topic.upload()
    topic.trim_local()
    topic.append_many([b"y"] * 10)
    found = ask(server)
    (shown,) = found["topics"]
    assert {
        name: shown[name] for name in ("name", "start", "appended", "uploaded", "verified")
    } == {
        "name": NAME,
        "start": 0,
        "appended": 510,
        "uploaded": 500,
        "verified": 500,
    }
    spans = shown["spans"]
    assert tiers(spans, "verified") == [(each.start_offset, each.next_offset) for each in objects]
    assert tiers(spans, "segment")[-1][1] >= 500
    assert tiers(spans, "memory")[-1] == (shown["synced"], 510) or shown["synced"] == 510
    assert tiers(spans, "gap") == []
    named = {each["name"]: each for each in spans if "name" in each}
    assert named[objects[0].object_id]["bytes"] == objects[0].size
    last = topic.segments()[-1]
    assert named[last.path.name]["kept_because"] == "it holds the newest message"
    assert shown["sizes"]["objects"] == len(objects)
    assert found["totals"]["object_bytes"] == sum(each.size for each in objects)
    assert found["history"]["fields"] == list(FIELDS)
    assert found["server"]["runner"] is None
    assert found["server"]["max_object_bytes"] == 32 * KIB
    assert found["totals"]["gaps"] == 0
    assert found["objects"]["root"].endswith("/objects")
    done = {each["operation"] for each in found["requests"]["by_operation"]}
    assert "put" in done


def test_it_tells_what_uploads_each_topic_and_its_own_settings(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    uploader = replace(settings.uploader, enabled=True, runner="spark", interval_seconds=3600)
    with served(replace(settings, uploader=uploader)) as server:
        rolls, other = server.store.topic("rolls"), server.store.topic("other")
        rolls.configure(rolling=True, max_open_seconds="30s")
        found = {row["name"]: row for row in ask(server)["topics"]}
        assert found[rolls.name]["uploaded_by"] == "owner"
        assert found[rolls.name]["upload_seconds"] == 30
        assert found[rolls.name]["own_settings"] == {"rolling": "true", "max_open_seconds": "30s"}
        assert found[other.name]["uploaded_by"] == "spark"
        assert found[other.name]["own_settings"] == {}


def test_topics_come_a_page_at_a_time_with_all_of_them_counted(server: Served) -> None:
    for name in ("a", "b", "c"):
        server.store.topic(name)
    first = ask(server, "/v1/overview?topics=2")
    assert [each["name"] for each in first["topics"]] == ["/default/a", "/default/b"]
    assert (first["topics_total"], first["next"]) == (3, "/default/b")
    second = ask(server, "/v1/overview?topics=2&after=/default/b")
    assert [each["name"] for each in second["topics"]] == ["/default/c"]
    assert second["next"] is None


def test_topics_that_are_not_open_are_shown(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    with Store(settings) as store:
        fill(store.topic(NAME))
        store.topic(NAME).upload()
    with served(settings) as server:
        (shown,) = ask(server)["topics"]
        assert (shown["open"], shown["appended"], shown["verified"]) == (False, 500, 500)
        assert tiers(shown["spans"], "memory") == []
        assert server.store.opened(NAME) is None


def test_a_window_tells_apart_what_the_whole_joined(server: Served) -> None:
    topic = server.store.topic(NAME)
    fill(topic, 30)
    topic.upload()
    found = ask(server, f"/v1/overview/spans?topic={NAME}&start=1000&end=1001")
    (stored,) = [each for each in found["spans"] if each["tier"] == "verified"]
    assert stored["start"] <= 1000 < stored["end"]
    assert "merged" not in stored


@pytest.mark.parametrize(
    "path",
    [
        "/v1/overview?topics=0",
        "/v1/overview?topics=many",
        "/v1/overview?topics=201",
        "/v1/overview?since=nan",
        "/v1/overview?since=-1",
        "/v1/overview?since=now",
        "/v1/overview?after=%20",
        "/v1/overview/spans",
        "/v1/overview/spans?topic=a&start=5&end=5",
        "/v1/overview/spans?topic=a&start=-1",
        "/v1/overview/spans?topic=a&end=99999999999999999999",
    ],
)
def test_bad_input_is_refused(server: Served, path: str) -> None:
    with pytest.raises(UsageError):
        ask(server, path)


def test_the_spans_of_an_unknown_topic_are_not_found(server: Served) -> None:
    with pytest.raises(UnknownTopic):
        ask(server, "/v1/overview/spans?topic=nobody")


def test_since_leaves_out_what_is_known(server: Served) -> None:
    wait_until(lambda: len(server.context.watch.history.since()) > 0)
    rows = ask(server)["history"]["rows"]
    assert rows
    newer = ask(server, f"/v1/overview?since={rows[-1][0]}")["history"]["rows"]
    assert all(row[0] > rows[-1][0] for row in newer)


def test_it_is_made_once_for_all_who_ask_at_once(server: Served) -> None:
    server.store.topic(NAME)
    answers: list[float] = []

    def poll() -> None:
        with server.new_client() as client:
            answers.append(client.json("GET", "/v1/overview")["at"])

    threads = [threading.Thread(target=poll) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(answers) == 8
    assert len(set(answers)) < 8


def test_running_jobs_come_first(server: Served) -> None:
    jobs = OneJob()
    server.context.jobs = jobs
    jobs.submit("offload", [], {})
    jobs.submit("verify", [], {})
    jobs.advance(state="done")
    found = ask(server)
    assert [job["kind"] for job in found["jobs"]] == ["offload", "verify"]
    assert found["server"]["spark"]["state"] == "ready"


# ---- what is cheap ----


def test_many_topics_cost_what_the_shown_ones_cost(tmp_path: Path) -> None:
    with Store(settings_in(tmp_path)) as store:
        for number in range(40):
            store.topic(f"topic-{number:02}").append(b"x")
        context = ServerContext(store)
        states = context.watch.states
        assert len(states.names()) == 40
        Overviews(context).document(10, "", 0.0)
        assert len(states._chains) == 10  # what was read shows nowhere else


def test_objects_are_read_again_only_when_the_chain_changed(tmp_path: Path) -> None:
    with Store(settings_in(tmp_path)) as store:
        topic = store.topic(NAME)
        fill(topic)
        topic.upload()
        states = TopicStates(store)
        first = states.read(NAME)
        known = states._chains[NAME].objects  # equal ones would not show that they were kept
        assert states.read(NAME).objects == first.objects
        assert states._chains[NAME].objects is known
        fill(topic)
        topic.upload()
        assert len(states.read(NAME).objects) > len(first.objects)


# ---- what needs attention ----


def test_while_the_catalog_is_away_what_it_said_last_is_shown(tmp_path: Path) -> None:
    kv = FaultKv(SqliteKv(None))
    settings = replace(settings_in(tmp_path), remote_retention=RemoteRetentionSettings(size_mb=99))
    with Store(settings, catalog=Catalog(kv)) as store:
        topic = store.topic(NAME)
        fill(topic)
        topic.upload()
        context = ServerContext(store)
        known = context.watch.states.read(NAME)
        kv.fail_reads(times=100)
        with pytest.raises(ServiceUnavailable):  # from now on, it is unsure of the topic's start
            storage_of(topic).trim_remote()
        before = kv.count("get")
        for _ in range(10):
            assert context.watch.states.read(NAME).objects == known.objects
        kv.heal()
        assert kv.count("get") - before < 10
        (alert,) = alerts(context, ProbeResult("answers"), [])
        assert (alert.kind, alert.level) == ("catalog", "error")
        assert "What is shown of objects is what it said last" in alert.text


def test_a_store_that_does_not_answer_is_told_before_the_client_gives_up() -> None:
    gate = threading.Event()

    def ask_for_long() -> None:
        gate.wait(120)

    probe = StoreProbe(ask_for_long)
    asking = threading.Thread(target=probe.run_once)
    assert probe.result() == ProbeResult("unknown")
    asking.start()
    wait_until(lambda: probe.result().state == "away")
    assert probe.result().why == "it does not answer"
    gate.set()
    asking.join(120)
    assert probe.result().state == "answers"


def test_an_answer_that_is_an_error_says_what_it_said() -> None:
    def ask_in_vain() -> None:
        raise ServiceUnavailable("the bucket is on fire")

    probe = StoreProbe(ask_in_vain)
    probe.run_once()
    assert (probe.result().state, probe.result().why) == ("away", "the bucket is on fire")
    assert probe.is_watched()


def test_missing_messages_are_an_error_with_a_remedy(tmp_path: Path) -> None:
    with served(settings_in(tmp_path)) as server:
        topic = server.store.topic(NAME)
        fill(topic, 10)
        topic.upload()
        topic.trim_local()
        with server.store.view() as view:
            found = view.resources()
            assert found is not None
            catalog = found.catalog
            middle = catalog.get_object_descriptors_range(parse_topic(NAME), 0)[1]
            key = catalog.keys.descriptor(parse_topic(NAME), middle.start_offset)
            catalog.kv.commit([], [Remove(key)])
        shown = ask(server)
        assert tiers(shown["topics"][0]["spans"], "gap") == [
            (middle.start_offset, middle.next_offset)
        ]
        (alert,) = shown["alerts"]
        assert alert["level"] == "error"
        assert f"forebay verify {NAME}" in alert["text"]


def test_a_server_that_is_not_ready_and_a_driver_that_ended_are_told(tmp_path: Path) -> None:
    class Ended(OneJob):
        def driver(self) -> Any:
            return structs.replace(super().driver(), state="restarting", error="it was killed")

    with Store(settings_in(tmp_path)) as store:
        context = ServerContext(store, unready="topics are being opened", jobs=Ended())
        found = alerts(context, ProbeResult("away", 0.0, "no route to it"), [])
    assert [each.kind for each in found] == ["store", "spark", "unready"]
    assert "Appends go on" in found[0].text


def test_no_secret_of_the_store_is_told(tmp_path: Path) -> None:
    cloud = CloudSettings(
        backend="s3",
        root="s3://logs/forebay",
        options={"access_key": "AKIA-SECRET", "secret_key": "SECRET", "region": "eu"},
    )
    backend = CloudStore(MemoryBackend())
    settings = replace(settings_in(tmp_path), cloud=cloud)
    settings = replace(settings, admin=replace(settings.admin, token="TOKEN-SECRET"))
    with Store(settings, store=backend) as store:
        text = Overviews(ServerContext(store)).document(10, "", 0.0)
    assert b"s3://logs/forebay" in text
    assert b"SECRET" not in text


@pytest.mark.parametrize("limit", [0.01, None])
def test_without_a_limit_an_upload_is_never_late(tmp_path: Path, limit: float | None) -> None:
    uploader = UploaderSettings(
        runner="spark", interval_seconds=0.01, max_open_seconds=limit, max_object_bytes=None
    )
    with served(replace(settings_in(tmp_path), uploader=uploader)) as server:
        server.store.topic(NAME).append(b"x", durability="synced")
        wait_until(lambda: (_lag(server) or 0) > 1)
        found = server.client.json("GET", "/v1/overview")
    assert found["server"]["max_open_seconds"] == limit
    assert found["server"]["max_object_bytes"] == uploader.object_bytes_max
    late = [each for each in found["alerts"] if each["kind"] == "late"]
    assert bool(late) == (limit is not None)


def _lag(server: Served) -> float | None:
    """The seconds that the topic's oldest message waits for its upload, as the page shows them."""
    topics = server.client.json("GET", "/v1/overview")["topics"]
    return max((each["lag"]["seconds"] for each in topics), default=None)
