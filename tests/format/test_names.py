"""Names: what is a topic, what is a segment, and nothing in between."""

from __future__ import annotations

import unicodedata
from pathlib import Path, PurePosixPath
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.errors import InvalidSetting, InvalidTopicName, UsageError
from forebay.format.names import (
    CHECKPOINT_FILE,
    FAILED_FILE,
    LOG_ID_FILE,
    PUBLISHED_FILE,
    UPLOADER_CHECKPOINT_FILE,
    CatalogKeys,
    ObjectName,
    SegmentNames,
    TopicName,
    after_prefix,
    aside,
    aside_directory,
    is_finished,
    is_staged_segment,
    is_topic,
    ledger_name,
    object_files,
    object_key,
    object_metadata,
    object_of_file,
    objects_prefix,
    parse_ledger,
    parse_object,
    parse_pending,
    parse_topic,
    pending_object,
    sidecar,
    staged_segment,
    subscription_cursor,
    subscription_of_cursor,
    topic_of_key,
)
from forebay.limits import FILE_NAME_BYTES_MAX, OFFSET_MAX, TOPIC_NAME_BYTES_MAX

parts = st.text(
    st.one_of(st.sampled_from("_-"), st.characters(categories=("L", "N"))), min_size=1, max_size=30
)

# ---- topics ----


@settings(max_examples=200)
@given(namespace=parts, topic=parts)
def test_two_parts_of_letters_digits_underscore_and_dash_are_a_topic(
    namespace: str, topic: str
) -> None:
    name = parse_topic(f"/{namespace}/{topic}")
    assert name == TopicName(namespace, topic)
    assert parse_topic(str(name)) == name


@settings(max_examples=100)
@given(topic=parts)
def test_one_part_alone_is_in_the_default_namespace(topic: str) -> None:
    assert str(parse_topic(topic)) == f"/default/{topic}"


def follows_the_rule(name: str) -> bool:
    """The rule of docs/formats/names.md, written differently from the code."""
    found = [name] if "/" not in name else name.split("/")[1:]
    return (
        (len(found) == 1 or (len(found) == 2 and name.startswith("/")))
        and "/" not in found[0]
        and (len(found) == 1) == ("/" not in name)
        and all(1 <= len(part.encode("utf-8", "replace")) <= 255 for part in found)
        and all(
            letter in "_-" or unicodedata.category(letter)[0] in "LN"
            for part in found
            for letter in part
        )
    )


@settings(max_examples=400)
@given(
    name=st.one_of(
        st.text(max_size=12),
        st.text("/aB9_-.é \0", max_size=12),
        st.from_regex(r"(/?[a-zA-Z0-9_.-]{0,4}){0,4}", fullmatch=True),
    )
)
def test_a_name_is_accepted_exactly_when_it_follows_the_rule(name: str) -> None:
    if follows_the_rule(name):
        topic = parse_topic(name)
        assert str(topic) == (name if name.startswith("/") else f"/default/{name}")
    else:
        with pytest.raises(InvalidTopicName):
            parse_topic(name)


@pytest.mark.parametrize(
    "name",
    [
        "", "/", "//", "///", "a/b", "/a", "/a/", "//b", "/a/b/", "/a/b/c", "a/", " ", "/a/b ",
        ".", "..", "/../..", "/a/..", "/./b", "../b", "/a/../../etc", "/default/wal.log",
        "/a/b.c", "/a\\b/c", "a\0b", "/a/b\n", "\n", "a:b", "a*", "~", "~root", "$HOME", "%2e%2e",
        "a\u2215b", "a\uff0fb", "\u202ea", "a\u200bb", "e\u0301", "\U0001f600", "\ud800",
    ],
)  # fmt: skip
def test_a_bad_name_is_refused_with_the_rule(name: str) -> None:
    with pytest.raises(InvalidTopicName) as raised:
        parse_topic(name)
    assert repr(name) in str(raised.value)
    assert "a topic is /namespace/topic" in str(raised.value)
    assert "letters, digits, '_' and '-'" in str(raised.value)


@pytest.mark.parametrize("name", ["größe", "заказы", "注文", "طلب", "ﬁ", "x²", "٣", "Ⅷ", "-", "_"])
def test_letters_and_digits_of_any_script_are_taken(name: str) -> None:
    assert parse_topic(name).topic == name


@pytest.mark.parametrize("letter", ["a", "ж", "注"])
def test_a_part_is_as_long_as_a_directory_name_may_be_in_bytes(letter: str) -> None:
    most = TOPIC_NAME_BYTES_MAX // len(letter.encode())
    for build in ("{}", "/default/{}", "/{}/t"):
        parse_topic(build.format(letter * most))
        with pytest.raises(InvalidTopicName, match="255 bytes"):
            parse_topic(build.format(letter * (most + 1)))


@settings(max_examples=100)
@given(namespace=parts, topic=parts)
def test_a_topics_directory_is_two_levels_below_the_data_directory(
    namespace: str, topic: str
) -> None:
    name = parse_topic(f"/{namespace}/{topic}")
    path = PurePosixPath("data") / name.namespace / name.topic
    assert path.parts == ("data", namespace, topic)
    assert ".." not in path.parts


def test_directories_of_such_names_can_be_made(tmp_path: Path) -> None:
    for name in ("größe", "注" * 85, "-", "a" * 255):
        topic = parse_topic(name)
        (tmp_path / topic.namespace / topic.topic).mkdir(parents=True)


@pytest.mark.parametrize(
    ("name", "base", "partition"),
    [
        ("/a/b", "/a/b", 0),
        ("/a/b-part-0", "/a/b", 0),
        ("/a/b-part-12", "/a/b", 12),
        ("/a/b-part-999999999", "/a/b", 999_999_999),
        ("/a/b-part-1-part-2", "/a/b-part-1", 2),
        ("/a/b-part-01", "/a/b-part-01", 0),
        ("/a/b-part-", "/a/b-part-", 0),
        ("/a/b-part-x", "/a/b-part-x", 0),
        ("/a/b-part-٣", "/a/b-part-٣", 0),
        ("/a/b-part-9999999999", "/a/b-part-9999999999", 0),
        ("/a/-part-3", "/a/-part-3", 0),
        ("/a-part-3/b", "/a-part-3/b", 0),
    ],
)
def test_a_partition_is_the_number_behind_the_name(name: str, base: str, partition: int) -> None:
    topic = parse_topic(name)
    assert (topic.base, topic.partition) == (base, partition)
    assert parse_topic(topic.base)


# ---- segments ----

ascii_parts = st.text("abcXYZ019_-ж", min_size=1, max_size=8)
file_names = st.builds("{}.{}".format, ascii_parts, ascii_parts)
numbers = st.integers(0, 10**18 - 1)


@settings(max_examples=200)
@given(first=file_names, seq=numbers)
def test_a_segments_name_tells_its_number(first: str, seq: int) -> None:
    names = SegmentNames(first)
    assert names.parse(names.segment(seq)) == seq
    assert names.parse(names.index(seq)) is None
    assert names.parse(aside(names.segment(seq), "torn", 5)) is None
    assert names.parse(names.segment(seq) + ".tmp") is None


@settings(max_examples=200)
@given(first=file_names, name=st.one_of(st.text("wal.log0123456789", max_size=12), file_names))
def test_whatever_parses_as_a_segment_is_the_name_of_that_segment(first: str, name: str) -> None:
    names = SegmentNames(first)
    seq = names.parse(name)
    assert seq is None or names.segment(seq) == name


@settings(max_examples=100)
@given(first=file_names, one=numbers, other=numbers)
def test_no_two_files_of_a_log_have_one_name(first: str, one: int, other: int) -> None:
    names = SegmentNames(first)
    fixed = [CHECKPOINT_FILE, UPLOADER_CHECKPOINT_FILE, PUBLISHED_FILE, FAILED_FILE]
    several = {one, other}
    files = [
        *fixed,
        *(names.segment(seq) for seq in several),
        *(names.index(seq) for seq in several),
        *(aside(names.segment(seq), "torn", 7) for seq in several),
    ]
    files += [f"{name}.tmp" for name in files]
    assert len(set(files)) == len(files)


@pytest.mark.parametrize(
    ("name", "seq"),
    [
        ("wal.log", 0),
        ("wal.1.log", 1),
        ("wal.999999999999999999.log", 10**18 - 1),
        ("wal.0.log", None),
        ("wal.01.log", None),
        ("wal.-1.log", None),
        ("wal.1000000000000000000.log", None),
        ("wal..log", None),
        ("wal.x.log", None),
        ("wal.٣.log", None),
        ("wal.1.2.log", None),
        ("wal.log.1", None),
        ("wal.log.5.torn", None),
        ("wal.log.tmp", None),
        ("wal.1.idx", None),
        ("wal.log\n", None),
        ("Wal.log", None),
        ("walxlog", None),
        ("", None),
    ],
)
def test_only_exact_names_are_segments(name: str, seq: int | None) -> None:
    assert SegmentNames().parse(name) == seq


@pytest.mark.parametrize(
    "taken",
    [
        "wal.ckpt", "uploader.ckpt", "wal.synced", "wal.failed", "wal.idx", "x.idx", "wal.tmp",
        "wal.torn", "wal.unusable",
    ],
)  # fmt: skip
def test_a_file_name_that_another_file_of_the_log_has_is_refused(taken: str) -> None:
    with pytest.raises(InvalidSetting, match=f"^file_name is '{taken}'"):
        SegmentNames(taken)


@pytest.mark.parametrize(
    "bad",
    ["", ".", "wal", ".log", "wal.", "a.b.log", "../wal.log", "/wal.log", "x/wal.log", "wal log.x"],
)
def test_a_file_name_that_is_not_a_stem_and_an_ending_is_refused(bad: str) -> None:
    with pytest.raises(InvalidSetting, match="file_name"):
        SegmentNames(bad)


def test_a_file_name_leaves_room_for_what_is_added_to_it() -> None:
    longest = "w" * (FILE_NAME_BYTES_MAX - 4) + ".log"
    derived = aside(SegmentNames(longest).segment(10**18 - 1), "99.torn", 2**63)
    assert len(derived) <= 255
    with pytest.raises(InvalidSetting, match=str(FILE_NAME_BYTES_MAX)):
        SegmentNames("w" + longest)


def test_what_was_cut_off_a_segment_is_named_after_it() -> None:
    assert aside("wal.3.log", "torn", 1234) == "wal.3.log.1234.torn"
    assert aside("wal.3.log", "1.torn", 1234) == "wal.3.log.1234.1.torn"


def test_what_a_repair_writes_beside_a_segment_is_known_by_its_name() -> None:
    names = SegmentNames()
    for seq, copy in ((0, 0), (3, 0), (3, 1), (12, 40)):
        staged = staged_segment(names.segment(seq), copy)
        assert is_staged_segment(staged, names)
        assert not is_staged_segment(staged, SegmentNames("other.log"))
        assert names.parse(staged) is None
    for name in ("wal.log", "wal.log.tmp", "wal.idx.repair.tmp", "wal.log.repair.x.tmp"):
        assert not is_staged_segment(name, names)


@pytest.mark.parametrize("taken", [LOG_ID_FILE, "x.id"])
def test_a_file_name_that_would_meet_the_logs_id_is_refused(taken: str) -> None:
    with pytest.raises(InvalidSetting, match=f"^file_name is '{taken}'"):
        SegmentNames(taken)


def test_what_is_set_aside_is_no_file_of_the_log() -> None:
    stem = aside_directory("0" * 32)
    names = SegmentNames()
    for file in ("wal.log", "wal.7.log", "wal.ckpt", "wal.idx"):
        assert names.parse(f"{stem}-{file}") is None
    kept = SegmentNames(f"{stem}-wal.log")
    assert [kept.parse(f"{stem}-{names.segment(seq)}") for seq in (0, 7)] == [0, 7]


# ---- objects ----

offsets = st.integers(0, OFFSET_MAX)
tokens = st.text("0123456789abcdef", min_size=1, max_size=32)
topics = st.builds(TopicName, parts, parts)


@settings(max_examples=200)
@given(ends=st.tuples(offsets, offsets), attempt=st.integers(0, 999_999_999))
def test_an_objects_name_comes_back_as_its_range(ends: tuple[int, int], attempt: int) -> None:
    start, end = sorted(ends)
    name = ObjectName(start, end, attempt)
    assert parse_object(str(name)) == name
    assert parse_pending(str(name)) is None
    assert parse_object(sidecar(str(name))) is None


@settings(max_examples=100)
@given(start=offsets, token=tokens)
def test_a_pending_name_comes_back_as_its_start(start: int, token: str) -> None:
    name = pending_object(start, token)
    assert parse_pending(name) == start
    assert parse_object(name) is None


@settings(max_examples=300)
@given(
    name=st.one_of(
        st.text(max_size=30),
        st.from_regex(r"data-[0-9]{1,3}-([0-9]{1,3}|pending)(-[0-9a-f]{1,3})?\.dnb1(\.json)?"),
    )
)
def test_whatever_is_parsed_is_built_again(name: str) -> None:
    found = parse_object(name)
    assert found is None or str(found) == name
    if parse_pending(name) is not None:
        assert found is None


def test_names_of_objects_are_danubes() -> None:
    assert str(ObjectName(0, 9)) == "data-0-9.dnb1"
    assert str(ObjectName(0, 9, 2)) == "data-0-9-2.dnb1"
    assert sidecar("data-0-9.dnb1") == "data-0-9.dnb1.json"
    assert pending_object(7, "1ab") == "data-7-pending-1ab.dnb1"
    assert parse_pending("data-7-pending.dnb1") == 7
    key = "storage/topics/default/orders/objects/data-0-9.dnb1"
    assert object_key(TopicName("default", "orders"), "data-0-9.dnb1") == key


@pytest.mark.parametrize(
    "name",
    [
        "", "data-0-9", "data-0-9.dnb2", "data-00-9.dnb1", "data-0-09.dnb1", "data-9-0.dnb1",
        "data--1-9.dnb1", "data-0-9-0.dnb1", "data-0-9-01.dnb1", "data-0-9.dnb1 ",
        "data-0-9.dnb1\n", "Data-0-9.dnb1", "x/data-0-9.dnb1", "data-0-٩.dnb1", "data-0-9-.dnb1",
        "data-0-99999999999999999999.dnb1", "data-0-pending.dnb1",
    ],
)  # fmt: skip
def test_what_is_almost_an_objects_name_is_none(name: str) -> None:
    assert parse_object(name) is None


@pytest.mark.parametrize(
    "name",
    ["data-0-pending-.dnb1", "data-0-pending-G.dnb1", "data-x-pending.dnb1", "data-0-pending"],
)
def test_what_is_almost_a_pending_name_is_none(name: str) -> None:
    assert parse_pending(name) is None


@settings(max_examples=100)
@given(topic=topics, ends=st.tuples(offsets, offsets))
def test_an_objects_key_comes_back_as_its_topic_and_name(
    topic: TopicName, ends: tuple[int, int]
) -> None:
    name = str(ObjectName(min(ends), max(ends)))
    key = object_key(topic, name)
    assert topic_of_key(key) == (topic, name)
    assert key.startswith(objects_prefix(topic))


@pytest.mark.parametrize(
    "key",
    [
        "", "storage/topics/", "storage/topics/a/b/objects", "storage/topics/a/b/objects/x/y",
        "storage/topics/a/b/other/x", "/storage/topics/a/b/objects/x", "topics/a/b/objects/x",
        "storage/topics/a/../objects/x", "storage/topics//b/objects/x",
    ],
)  # fmt: skip
def test_a_key_elsewhere_is_no_objects(key: str) -> None:
    assert topic_of_key(key) is None


# ---- the catalog ----

roots = st.sampled_from(["", "/", "/forebay", "/a/b", "/größe/"])


@settings(max_examples=100)
@given(root=roots, topic=topics, start=offsets)
def test_keys_of_the_catalog_come_back_as_what_they_are_for(
    root: str, topic: TopicName, start: int
) -> None:
    keys = CatalogKeys(root)
    assert keys.topic_of_record(keys.record(topic)) == topic
    assert keys.descriptor_start(topic, keys.descriptor(topic, start)) == start
    for other in (keys.owner(topic), keys.current(topic), keys.life(topic, "record")):
        assert keys.topic_of_record(other) is None
        assert keys.descriptor_start(topic, other) is None
    for key in (keys.record(topic), keys.owner(topic), keys.current(topic), keys.life(topic, "x")):
        assert keys.topics() <= keys.topic(topic) <= key < after_prefix(keys.topic(topic))


@settings(max_examples=100)
@given(root=roots, topic=topics, other=topics, name=st.text(min_size=1, max_size=40))
def test_keys_of_subscriptions_come_back_as_what_they_are_for(
    root: str, topic: TopicName, other: TopicName, name: str
) -> None:
    keys = CatalogKeys(root)
    key = keys.subscription(topic, name)
    assert keys.subscription_of(key) == (topic, name)
    assert keys.all_subscriptions() <= key < after_prefix(keys.all_subscriptions())
    assert key.startswith(keys.subscriptions(other)) is (topic == other)
    assert keys.subscription_of(keys.subscriptions(topic)) is None
    row = keys.nonreliable(topic)
    assert keys.nonreliable_of(row) == topic
    for foreign in (keys.record(topic), row, keys.cursor_row(topic, name)):
        assert keys.subscription_of(foreign) is None
    for foreign in (keys.record(topic), key, row + "/"):
        assert keys.nonreliable_of(foreign) is None
    cursor = keys.cursor_row(topic, subscription_cursor(name))
    assert cursor.startswith(keys.subscription_cursor_rows(topic))
    assert subscription_of_cursor(keys.cursor_row_name(topic, cursor)) == name


def test_no_other_cursor_has_the_name_of_a_subscriptions() -> None:
    keys = CatalogKeys("/forebay")
    topic = TopicName("default", "orders")
    assert subscription_of_cursor("checkpoint") is None
    assert subscription_of_cursor("sub") is None
    assert subscription_cursor("checkpoint") == "sub/checkpoint"
    assert keys.cursor_row(topic, "sub/a b").endswith("/orders/cursors/sub%2Fa%20b")
    assert keys.subscription(topic, "a/b") == "/forebay/subscriptions/default/orders/a%2Fb"
    assert keys.nonreliable(topic) == "/forebay/nonreliable/default/orders"


@settings(max_examples=100)
@given(topic=topics, starts=st.tuples(offsets, offsets))
def test_descriptors_are_ordered_by_offset_and_the_pointer_is_behind_them(
    topic: TopicName, starts: tuple[int, int]
) -> None:
    keys = CatalogKeys("/forebay")
    low, high = sorted(starts)
    assert keys.descriptor(topic, low) <= keys.descriptor(topic, high)
    assert keys.descriptor(topic, OFFSET_MAX) < keys.current(topic)


@settings(max_examples=200)
@given(first=topics, second=topics)
def test_no_key_of_one_topic_is_among_those_of_another(first: TopicName, second: TopicName) -> None:
    keys = CatalogKeys("/forebay")
    inside = keys.record(second).startswith(keys.topic(first))
    assert inside is (first == second)


@settings(max_examples=200)
@given(prefix=st.text(min_size=1, max_size=5).map(lambda text: text + "/"), rest=st.text())
def test_what_starts_with_a_prefix_is_before_what_is_after_it(prefix: str, rest: str) -> None:
    assert prefix <= prefix + rest < after_prefix(prefix)
    assert not after_prefix(prefix).startswith(prefix)


def test_keys_of_the_catalog_are_where_danube_has_them() -> None:
    keys = CatalogKeys("/danube/")
    topic = TopicName("default", "orders")
    below = "/danube/storage/topics/default/orders/"
    assert keys.descriptor(topic, 42) == below + "objects/00000000000000000042"
    assert keys.current(topic) == below + "objects/cur"
    assert keys.record(topic) == below + "record"
    assert keys.owner(topic) == below + "owner"
    assert keys.life(topic, "data-0-9.dnb1") == below + "keys/data-0-9.dnb1"
    assert keys.cursor(topic, "s") == "/danube/topics/default/orders/subscriptions/s/cursor"
    assert is_topic("/default/orders")


@pytest.mark.parametrize("root", ["forebay", "a/b", "//a", "/a//b", "/a\0b"])
def test_a_root_that_is_no_path_is_refused(root: str) -> None:
    with pytest.raises(InvalidSetting, match="root_prefix"):
        CatalogKeys(root)


@given(st.uuids(), st.integers(0, 2**63 - 1), st.booleans())
def test_the_name_of_a_ledger_is_parsed_again(uid: UUID, ledger_id: int, index: bool) -> None:
    name = ledger_name(str(uid), ledger_id)
    assert parse_ledger(name.data_name) == name
    assert parse_ledger(name.index_name) == name._replace(is_index=True)
    assert str(name._replace(is_index=index)) == f"{uid}-ledger-{ledger_id}" + "-index" * index


@pytest.mark.parametrize(
    "name",
    [
        "ledger-1",
        "7F0E0000-0000-4000-8000-000000000000-ledger-1",
        "7f0e0000-0000-4000-8000-000000000000-ledger-01",
        "7f0e0000-0000-4000-8000-000000000000-ledger--1",
        "7f0e0000-0000-4000-8000-000000000000-ledger-9223372036854775808",
        "7f0e0000-0000-4000-8000-000000000000-ledger-1-index-index",
        "7f0e0000-0000-4000-8000-000000000000",
        "data-0-9.dnb1",
    ],
)
def test_other_names_are_not_those_of_ledgers(name: str) -> None:
    assert parse_ledger(name) is None


def test_the_name_of_a_ledger_is_a_uuid_and_a_number() -> None:
    with pytest.raises(UsageError, match="a UUID in lower case"):
        ledger_name("x", 1)


def test_the_files_of_an_object_are_told_by_its_name_and_tell_it() -> None:
    ledger = "7f0e0d1c-0b0a-4009-8807-060504030201-ledger-42"
    for object_id, files in (
        (ledger, (f"{ledger}-index", ledger)),
        ("data-0-9.dnb1", ("data-0-9.dnb1",)),
        ("data-0-9.dnb1.zst", ("data-0-9.dnb1.zst",)),
        ("data-0-pending-ab.dnb1", ("data-0-pending-ab.dnb1",)),
    ):
        assert object_files(object_id) == files
        assert {object_of_file(name) for name in (*files, sidecar(object_id))} == {object_id}
    assert [is_finished(each) for each in (ledger, "data-0-9.dnb1")] == [True, True]
    for other in (f"{ledger}-index", "data-0-pending-ab.dnb1", f"{ledger}.json", "x"):
        assert not is_finished(other)


def test_a_ledger_has_the_metadata_that_a_broker_demands() -> None:
    topic = TopicName("default", "größe-part-3")
    ledger = "7f0e0d1c-0b0a-4009-8807-060504030201-ledger-42"
    found = object_metadata(topic, ledger)
    assert found["s3managedledgeroffloaderformatversion"] == "1"
    assert found["role"] == "data"
    assert found["managedledgername"] == "public/default/persistent/gr%C3%B6%C3%9Fe-partition-3"
    assert object_metadata(topic, f"{ledger}-index") == {**found, "role": "index"}
