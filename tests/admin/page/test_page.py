"""The page in a real browser: what a store does is seen on it.

The bars are drawn, so the tests look at what the page says of them in words, which is what a
screen reader reads, and at what it tells of a span that is pointed at.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, expect

from forebay.errors import ServiceError
from forebay.format.names import parse_ledger, parse_topic
from forebay.limits import KIB
from forebay.settings import (
    AdminSettings,
    CloudSettings,
    DeleterSettings,
    MetadataSettings,
    StoreSettings,
    UploaderSettings,
    WalSettings,
)
from forebay.topic.store import Store, Topic
from support.browser_fixtures import PATIENCE_MS, Visitor, Visits
from support.one_job import OneJob
from support.proxy import FaultProxy
from support.proxy_relay import Faults
from support.served import Served, served

NAME = "/default/orders"
TOKEN = "a-token-of-the-tests"
OBJECTS_SHARE = 0.6
"""Where the lane of objects is in the height of a bar, whether it is zoomed or not."""
GONE = Faults(refuse=True, reset_rate=1, reset_after_bytes_max=1)

expect.set_options(timeout=PATIENCE_MS)


def settings_in(folder: Path, **parts: object) -> StoreSettings:
    """Nothing moves by itself; everything that objects hold may be deleted."""
    settings = StoreSettings(
        folder / "data",
        wal=WalSettings(rotate_max_bytes=16 * KIB, cache_capacity=64),
        uploader=UploaderSettings(enabled=False, max_object_bytes=32 * KIB),
        deleter=DeleterSettings(retention_size_mb=0, deletion_lag_minutes=0),
        cloud=CloudSettings(root=str(folder / "objects")),
        metadata=MetadataSettings(path=folder / "catalog.db", offsets_reserved=5000),
    )
    return replace(settings, **parts)  # type: ignore[arg-type]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    with served(settings_in(tmp_path)) as found:
        yield found


def fill(topic: Topic, messages: int = 600) -> None:
    for _ in range(messages // 100):
        topic.append_many([b"x" * 100] * 100, durability="synced")


def bar(page: Page, name: str = NAME) -> Locator:
    return page.locator(f"[data-topic='{name}'] canvas.bar")


def expect_said(page: Page, words: str, name: str = NAME) -> None:
    expect(bar(page, name)).to_have_attribute("aria-label", re.compile(words))


# ---- what a store does ----


def test_an_empty_store_shows_how_to_begin(server: Served, visit: Visits) -> None:
    page = visit(server.url).page
    expect(page.get_by_role("heading", name="Nothing is stored here yet")).to_be_visible()
    expect(page.locator("#begin-curl")).to_contain_text(f"{server.url}/v1/topics/default/greetings")
    expect(page.locator("#begin-cli")).to_contain_text("forebay produce greetings")
    server.store.topic("greetings").append(b"hello", durability="synced")
    expect_said(page, "offsets 0 to 0; 1 message in memory; 1 segment; 0 objects", greetings())
    expect(page.locator("#begin")).to_be_hidden()


def greetings() -> str:
    return "/default/greetings"


def test_messages_are_seen_on_their_way_through_the_tiers(server: Served, visit: Visits) -> None:
    topic = server.store.topic(NAME)
    fill(topic)
    page = visit(server.url).page
    segments = len(topic.segments())
    expect_said(page, f"offsets 0 to 599; 64 messages in memory; {segments} segments; 0 objects")
    expect(page.locator("[data-tier=segment] .number b")).to_have_text("600")

    objects = len(topic.upload())
    expect_said(page, f"{segments} segments; {objects} objects, {objects} verified")
    expect(page.locator("[data-tier=verified] .number b")).to_have_text("600")

    topic.trim_local()
    expect_said(page, f"1 segment; {objects} objects, {objects} verified")
    expect(page.locator("#charts .plot canvas")).to_have_count(6)
    expect(page.locator("#state-text")).to_have_text("live")


def test_a_topic_that_nobody_opened_is_shown_too(tmp_path: Path, visit: Visits) -> None:
    settings = settings_in(tmp_path)
    with Store(settings) as store:
        fill(store.topic("quiet"), 100)
    with served(settings) as server, visit:
        page = visit(server.url).page
        expect_said(page, "offsets 0 to 99; 0 messages in memory; 1 segment", "/default/quiet")


def test_a_lost_range_is_a_gap(tmp_path: Path, visit: Visits) -> None:
    settings = settings_in(tmp_path)
    with Store(settings) as store:
        fill(store.topic(NAME), 200)
        store.topic(NAME).upload()
        fill(store.topic(NAME), 100)
    shutil.rmtree(tmp_path / "data")
    with served(settings) as server, visit:
        topic = server.store.topic(NAME)
        first = topic.append(b"after the loss", durability="synced")
        assert first == 300
        page = visit(server.url).page
        expect_said(page, "objects, [0-9]+ verified; 100 offsets recorded as lost")
        expect_gap_of_unknown_size(page, "100 offsets that may have been handed out")
        point(page, 0.955)
        expect(page.locator("#tip")).to_contain_text("Recorded as lost")
        expect(page.locator("#tip")).to_contain_text("299, 100 offsets")
        expect(page.locator("#tip")).to_contain_text("may have been handed out")


def expect_gap_of_unknown_size(page: Page, words: str) -> None:
    """Offsets are reserved in blocks, so nobody knows how many messages a gap had."""
    expect(page.locator("[data-tier=gap] .number")).to_have_text("1 range")
    expect(page.locator("[data-tier=gap] .text")).to_contain_text(words)


def point(page: Page, share: float) -> None:
    """At the lane of objects of the first topic, so far from its left."""
    box = bar(page).bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + share * box["width"], box["y"] + OBJECTS_SHARE * box["height"])


def test_the_subscriptions_of_a_topic_are_a_table(server: Served, visit: Visits) -> None:
    topic = server.store.topic(NAME)
    fill(topic, 200)
    client = server.client
    path = f"/v1/topics{NAME}/subscriptions/billing"
    client.json("PUT", path, value={"type": "key-shared", "start": 150})
    page = visit(server.url).page
    table = page.get_by_role("table", name=f"Subscriptions of {NAME}")
    row = table.locator("[data-subscription=billing]")
    cells = ["billing", "key-shared", "none", "150"]
    for at, text in enumerate(cells):
        expect(row.locator("th, td").nth(at)).to_have_text(text)
    expect(row).to_contain_text(re.compile(r"50, [\d.]+ KiB"))
    client.json("POST", f"{path}/skip", value={"messages": "all"})
    expect(row.locator("td").nth(3)).to_have_text("none")
    expect(row.locator("td").nth(2)).to_have_text("200")
    client.json("DELETE", path)
    expect(table).to_be_hidden()


def test_the_subjects_of_schemas_are_a_table(server: Served, visit: Visits) -> None:
    fill(server.store.topic(NAME), 10)
    body = {"type": "string", "definition": "text"}
    server.client.json("POST", "/v1/schemas/subjects/orders-value", value=body)
    page = visit(server.url).page
    row = page.get_by_role("table", name="Subjects and their latest versions")
    row = row.locator("[data-subject=orders-value]")
    for at, text in enumerate(["orders-value", "string", "backward", "1", "1", "1"]):
        expect(row.locator("th, td").nth(at)).to_have_text(text)


def test_a_subscription_that_blocks_is_an_alert(server: Served, visit: Visits) -> None:
    fill(server.store.topic(NAME), 100)
    client = server.client
    client.json("PUT", f"/v1/topics{NAME}/subscriptions/billing", value={"start": 0})
    loaded = server.context.registry.loaded(parse_topic(NAME))
    assert loaded is not None
    ((_, subscription),) = loaded.rows()
    subscription.problem = "the message at offset 0 cannot be read"
    page = visit(server.url).page
    expect(page.locator("[data-kind=subscription]")).to_contain_text(
        f"The subscription billing of {NAME}: the message at offset 0 cannot be read."
    )
    expect(page.locator("tr.problem")).to_have_text("the message at offset 0 cannot be read")


# ---- looking closer ----


def test_an_object_that_is_a_ledger_is_shown_as_one(server: Served, visit: Visits) -> None:
    topic = server.store.topic(NAME)
    fill(topic, 200)
    frames = topic.upload()
    topic.configure(format="pulsar")
    fill(topic, 100)
    ledger = topic.upload()[0]
    name = parse_ledger(ledger.object_id)
    assert name is not None
    page = visit(server.url).page
    expect_said(page, f"{len(frames) + 1} objects")
    detail = page.locator(f"[data-topic='{NAME}'] .detail")
    bar(page).focus()
    for descriptor in frames:
        page.keyboard.press("ArrowRight")
        expect(detail).to_contain_text(f"Object {descriptor.object_id}")
        expect(detail).not_to_contain_text("ledger of Pulsar")
    page.keyboard.press("ArrowRight")
    expect(detail).to_contain_text(f"Ledger {name.ledger_id}")
    expect(detail).to_contain_text(f"{ledger.count} entries, {ledger.object_id}")


def test_one_can_zoom_to_a_single_object_and_read_its_name(server: Served, visit: Visits) -> None:
    topic = server.store.topic(NAME)
    fill(topic, 1000)
    objects = topic.upload()
    page = visit(server.url).page
    expect_said(page, f"{len(objects)} objects")
    detail = page.locator(f"[data-topic='{NAME}'] .detail")
    bar(page).focus()
    for descriptor in objects[:2]:
        page.keyboard.press("ArrowRight")
        expect(detail).to_contain_text(f"Object {descriptor.object_id}")
    page.keyboard.press("Enter")
    expect_said(page, "zoomed to")
    expect(detail).to_contain_text("committed, read back and compared")
    point(page, 0.5)
    expect(page.locator("#tip")).to_contain_text(f"Object {objects[1].object_id}")
    page.keyboard.press("ArrowUp")
    expect(detail).to_contain_text("Segment wal")
    expect(detail).to_contain_text("yes, by the next retention pass")
    page.keyboard.press("Escape")
    expect(bar(page)).not_to_have_attribute("aria-label", re.compile("zoomed"))


def zoomed_to(page: Page) -> tuple[int, int]:
    label = bar(page).get_attribute("aria-label") or ""
    found = re.search(r"zoomed to ([\d,]+) to ([\d,]+)", label)
    assert found, label
    return int(found[1].replace(",", "")), int(found[2].replace(",", ""))


def test_wheel_buttons_and_dragging_zoom_and_move(server: Served, visit: Visits) -> None:
    topic = server.store.topic(NAME)
    fill(topic, 1000)
    page = visit(server.url).page
    expect_said(page, "offsets 0 to 999")
    page.get_by_role("button", name=f"Zoom into {NAME}").click()
    expect_said(page, "zoomed to")
    start, end = zoomed_to(page)
    assert (start, end) == (250, 750)
    box = bar(page).bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 30)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 4, box["y"] + 30)
    page.mouse.up()
    assert zoomed_to(page) == (375, 875)
    bar(page).focus()
    page.mouse.wheel(0, -300)
    expect(bar(page)).not_to_have_attribute("aria-label", re.compile("zoomed to 375 to 875"))
    start, end = zoomed_to(page)
    assert 375 < start < end < 875
    page.get_by_role("button", name=f"Show all of {NAME}").click()
    expect(bar(page)).not_to_have_attribute("aria-label", re.compile("zoomed"))


# ---- trouble ----


def test_the_page_says_that_the_server_is_away_and_goes_on_when_it_is_back(
    server: Served, visit: Visits
) -> None:
    topic = server.store.topic(NAME)
    fill(topic, 100)
    with FaultProxy(server.url.removeprefix("http://")) as proxy:
        visitor = visit(proxy.url)
        visitor.expected = ["Failed to load resource"]
        page = visitor.page
        expect_said(page, "offsets 0 to 99")
        with proxy.faults(GONE):
            expect(page.locator("#state-text")).to_have_text("no answer, trying again")
            said = "The server does not answer, trying again. What is below is from"
            expect(page.locator("#alerts")).to_contain_text(said)
            fill(topic, 100)
        expect_said(page, "offsets 0 to 199")
        expect(page.locator("#alerts")).to_be_empty()
        expect(page.locator("#state-text")).to_have_text("live")


def test_the_page_asks_for_the_token(tmp_path: Path, visit: Visits) -> None:
    settings = settings_in(tmp_path, admin=AdminSettings(token=TOKEN))
    with served(settings) as server, visit:
        fill(server.store.topic(NAME), 100)
        visitor: Visitor = visit(server.url)
        visitor.expected = ["401"]
        page = visitor.page
        box = page.get_by_label("Token", exact=True)
        box.fill("a wrong one")
        box.press("Enter")
        expect(page.get_by_role("alert")).to_have_text("The server does not take this token.")
        box.fill(TOKEN)
        box.press("Enter")
        expect_said(page, "offsets 0 to 99")
        page.reload()
        expect_said(page, "offsets 0 to 99")


def test_warnings_and_the_store_being_away_are_told_in_plain_words(
    tmp_path: Path, visit: Visits
) -> None:
    settings = settings_in(tmp_path)
    with served(settings) as server, visit:
        topic = server.store.topic(NAME)
        fill(topic, 100)
        topic.upload()
        topic.append(b"one more")
        page = visit(server.url).page
        expect_said(page, "offsets 0 to 100")
        (tmp_path / "objects").rename(tmp_path / "elsewhere")
        (tmp_path / "objects").write_text("no directory")
        with pytest.raises(ServiceError):
            topic.upload()
        expect(page.locator("#notice-list")).to_contain_text("Upload failed")
        expect(page.locator("#alerts")).to_contain_text("The object store does not answer")
        (tmp_path / "objects").unlink()
        (tmp_path / "elsewhere").rename(tmp_path / "objects")
        expect(page.locator("#alerts")).to_be_empty()


# ---- jobs ----


def test_jobs_are_shown_with_their_progress_and_started_by_a_button(
    server: Served, visit: Visits
) -> None:
    fill(server.store.topic(NAME), 100)
    jobs = OneJob()
    page = visit(server.url).page
    expect(page.locator("#job-list")).to_contain_text("This server runs no Spark")
    server.context.jobs = jobs
    page.get_by_role("button", name="Verify").click()
    expect(page.locator("#job-answer")).to_have_text("The verify job is queued.")
    expect(page.locator("[data-job-state=queued]")).to_contain_text("verify")
    jobs.advance(state="running", started=1.0, done=3, total=8, label="reading objects back")
    expect(page.locator("#job-answer")).to_be_empty()
    expect(page.get_by_role("progressbar")).to_have_attribute("value", "3")
    jobs.advance(state="failed", ended=2.0, error="the object data-0-9.dnb1 is damaged")
    expect(page.locator("[data-job-state=failed]")).to_contain_text("data-0-9.dnb1 is damaged")


def test_a_job_that_was_asked_for_stays_in_sight_among_the_cycles(
    server: Served, visit: Visits
) -> None:
    fill(server.store.topic(NAME), 100)
    jobs = OneJob()
    server.context.jobs = jobs
    jobs.submit("verify", [], {})
    jobs.advance(state="done", started=1.0, ended=2.0, summary={"topics": 4, "objects": 1})
    for _ in range(30):
        jobs.cycle(topics=4, objects=1, messages=3, bytes=327)
    page = visit(server.url).page
    rows = page.locator("#job-list .row")
    expect(rows).to_have_count(2)
    expect(rows.first).to_contain_text("30 runs")
    expect(rows.first).to_contain_text(
        "30 objects with 90 messages (9.6 KiB) uploaded; 4 topics looked at"
    )
    expect(rows.last).to_contain_text("1 object read back; 4 topics looked at")
    for _ in range(7):
        jobs.submit("compact", [], {})
    page.get_by_role("button", name="Show 3 more").click()
    expect(page.locator("#job-list .row:visible")).to_have_count(9)
    expect(rows.last).to_be_visible()


# ---- every screen ----


def test_on_a_phone_nothing_is_wider_than_the_screen(server: Served, visit: Visits) -> None:
    topic = server.store.topic("/a-rather-long-namespace/and-a-topic-with-quite-a-long-name-too")
    fill(topic, 300)
    topic.upload()
    phone = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}
    page = visit(server.url, **phone).page
    expect_said(page, "verified", topic.name)
    expect(page.locator("#charts .plot canvas")).to_have_count(6)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    bar(page, topic.name).tap(position={"x": 60, "y": 30})
    expect(page.locator(".detail")).to_contain_text("Object data-0-")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def background(page: Page) -> tuple[int, ...]:
    text = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return tuple(int(each) for each in re.findall(r"\d+", text)[:3])


def test_colours_follow_the_system_and_the_button(server: Served, visit: Visits) -> None:
    fill(server.store.topic(NAME), 100)
    page = visit(server.url, color_scheme="dark").page
    expect_said(page, "offsets 0 to 99")
    assert max(background(page)) < 64
    button = page.get_by_role("button", name=re.compile("Colours"))
    button.click()
    expect(button).to_have_accessible_name("Colours: light")
    assert min(background(page)) > 200
    page.reload()
    expect_said(page, "offsets 0 to 99")
    assert min(background(page)) > 200


def test_many_topics_come_a_page_at_a_time(server: Served, visit: Visits) -> None:
    for number in range(52):
        server.store.topic(f"topic-{number:02}").append(b"x")
    page = visit(server.url).page
    expect(page.locator("#topics-count")).to_have_text("50 of 52")
    expect(page.locator(".topic")).to_have_count(50)
    page.get_by_role("button", name="Next topics").click()
    expect(page.locator(".topic")).to_have_count(2)
    expect(page.locator(".topic").first).to_have_attribute("data-topic", "/default/topic-50")
