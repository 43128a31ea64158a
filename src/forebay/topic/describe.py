"""Reports the state of a topic (`describe`), and where one offset is stored (`explain`).

Both use a `TopicView`, so they work without owning the topic. `describe` reads only the catalog and
the local directory. `explain` also reads the segment and the object that hold the offset, up to its
frame. The results become text or JSON.

Beware: messages that are only in the owner's memory are not seen here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from math import inf
from typing import Any, Final, Literal

from forebay.catalog.adopt import is_restoring, unfinished
from forebay.catalog.chain import Totals
from forebay.catalog.cursors import read_cursors
from forebay.catalog.records import TopicRecord, skip_holes
from forebay.config.topics import TopicSetting, in_effect
from forebay.errors import CorruptFrame, CorruptLog, DescriptorError, ServiceError
from forebay.format.blocks import BlockAssembler, object_decoder
from forebay.format.descriptor import ObjectDescriptor, decode_outline
from forebay.format.frame import HEADER_BYTES
from forebay.format.names import object_key, parse_ledger, subscription_of_cursor
from forebay.format.pulsar.frames import EntryAssembler
from forebay.limits import MIB, OFFSET_MAX
from forebay.read.verify import require_known_form
from forebay.settings import DeleterSettings, StoreSettings, UploaderSettings
from forebay.topic.configure import accepted
from forebay.topic.subscription_facts import SubscriptionFacts, stored_subscriptions
from forebay.topic.view import TopicView
from forebay.wal.retention import Deleter
from forebay.wal.segment import ChunkReader, Segment, require_complete

OBJECTS_LISTED: Final = 100
"""Segments and objects on one page, unless the caller says otherwise."""

CURSORS_LISTED: Final = 1000

Range = tuple[int, int]
"""A range of offsets, end not included."""

UploadedBy = Literal["owner", "spark"]


@dataclass(frozen=True, slots=True)
class SegmentFacts:
    file: str
    start_offset: int
    next_offset: int
    bytes: int
    """The synced bytes."""
    uploaded: bool
    verified: bool
    deletable: bool
    kept_because: str | None
    """Why retention would keep it now. Readers in the owner's process are not considered."""


@dataclass(frozen=True, slots=True)
class ObjectFacts:
    object_id: str
    start_offset: int
    next_offset: int
    bytes: int
    created_at: int
    """Seconds since 1970-01-01 UTC."""
    verified: bool
    codec: str | None = None
    """How it is compressed; None if it is not."""
    raw_bytes: int | None = None
    """Bytes of its frames, before compression, or before they were made entries of a ledger."""
    ledger_id: int | None = None
    """The id of the Pulsar ledger that it is; None if it is none. Its entries are its messages."""


@dataclass(frozen=True, slots=True)
class CursorFacts:
    name: str
    position: int
    """Every message before this offset is acknowledged."""
    ranges: int
    """Ranges of acknowledged offsets after it."""
    updated_ms: int


@dataclass(slots=True)
class TopicFacts:
    topic: str
    start_offset: int
    synced: int | None
    """The next offset of this stage, like those below; None if the topic's log is not here."""
    uploaded: int
    verified: int
    reserved: int | None
    epoch: int | None
    owner: str | None
    lost: list[Range]
    unknown: list[Range]
    """Ranges that may never have been used. If they were, their messages are lost."""
    accepted: list[Range]
    """Ranges that were lost or unknown. Readers jump over them."""
    segments: list[SegmentFacts]
    """The newest ones, oldest first."""
    objects: list[ObjectFacts]
    """A page of objects, oldest first: by default the newest ones."""
    problems: list[str]
    segments_total: int = 0
    """Of all segments, listed or not. The numbers below are totals, too."""
    segments_bytes: int = 0
    objects_total: int = 0
    objects_bytes: int = 0
    objects_counted: bool = True
    """False: there are at least so many objects. Their owner has not counted them yet."""
    objects_before: int | None = None
    """Where the listed objects begin, if there are older ones: `before` of the next page."""
    uploaded_by: UploadedBy | None = None
    """What uploads the topic in the background; None if nothing does."""
    settings: list[TopicSetting] = field(default_factory=list)
    """What the topic can have of its own, with where each value comes from."""
    cursors: list[CursorFacts] = field(default_factory=list)
    """What consumers have acknowledged, as far as the catalog has it; at most CURSORS_LISTED.

    Those of subscriptions are not among them."""
    subscriptions: list[SubscriptionFacts] = field(default_factory=list)
    """As far as the catalog has it; at most SUBSCRIPTIONS_LISTED."""


@dataclass(frozen=True, slots=True)
class FrameLocation:
    """Where a frame is: in a file of the local log, or in an object."""

    tier: Literal["segment", "object"]
    name: str
    position: int
    """Of the frame, or of its block if the object is compressed."""
    frame_bytes: int
    codec: str | None = None
    """How the object is compressed; None if it is not."""
    position_in_block: int | None = None
    """Of the frame in its block, after decompression."""


@dataclass(slots=True)
class OffsetFacts:
    topic: str
    offset: int
    state: Literal[
        "stored",
        "not yet synced",
        "not yet uploaded",
        "lost",
        "unknown",
        "accepted",
        "removed",
        "missing",
    ]
    places: list[FrameLocation] = field(default_factory=list)
    synced: bool = False
    uploaded: bool = False
    verified: bool = False
    deletable: bool | None = None
    """Whether the segment that holds it may be deleted; None if no segment holds it."""
    kept_because: str | None = None
    go_on_at: int | None = None
    """The next offset that can be read, if this one cannot."""
    problems: list[str] = field(default_factory=list)


# ---- a topic ----------------------------------------------------------------------------------


def describe(
    view: TopicView, newest: int = OBJECTS_LISTED, before: int | None = None
) -> TopicFacts:
    """Returns the facts of a topic, with the `newest` segments and the `newest` objects.

    With `before`, it lists the objects that begin before this offset instead: the next page. Only
    the objects that are listed, and those whose messages are also in segments, are read from the
    catalog.
    """
    record = view.record or TopicRecord()
    segments = view.segments()
    settings, listed_settings, refused = _settings(view)
    listed, totals = _listed(view, newest, OFFSET_MAX if before is None else before)
    local = _outlines(view, segments[0].first_offset) if segments else []
    owner = view.owner()
    subscriptions, damaged = stored_subscriptions(view)
    now_ms = view.store.clock.now_ms()
    kept = kept_because(segments, view.record, local, settings.deleter, now_ms)
    first = max(len(segments) - newest, 0)
    # Remote retention deletes from the start: older objects are there if an older offset is.
    older = bool(listed) and listed[0].start_offset > skip_holes(record, view.start_offset)
    return TopicFacts(
        topic=str(view.topic),
        start_offset=view.start_offset,
        synced=view.end_offset if view.has_local_log else None,
        uploaded=record.tail,
        verified=record.verified,
        reserved=view.record.reserved if view.record else None,
        epoch=view.record.epoch if view.record else None,
        owner=owner.name if owner else None,
        lost=list(record.lost),
        unknown=list(record.unknown),
        accepted=list(record.accepted),
        segments=[
            _segment_facts(segment, record, why)
            for segment, why in zip(segments[first:], kept[first:], strict=True)
        ],
        objects=[_object_facts(each, record) for each in listed],
        problems=[*refused, *damaged, *_problems(view), *_gaps(listed, record)],
        segments_total=len(segments),
        segments_bytes=sum(each.size for each in segments),
        objects_total=max(totals.objects, len(listed)),
        objects_bytes=max(totals.bytes, sum(each.size for each in listed)),
        objects_counted=totals.next is None,
        objects_before=listed[0].start_offset if older else None,
        uploaded_by=uploaded_by(settings.uploader),
        settings=listed_settings,
        cursors=_cursors(view),
        subscriptions=subscriptions,
    )


def uploaded_by(settings: UploaderSettings) -> UploadedBy | None:
    """Returns what uploads a topic with these settings in the background."""
    if not settings.enabled:
        return None
    return "owner" if settings.by_owner else "spark"


def _settings(view: TopicView) -> tuple[StoreSettings, list[TopicSetting], list[str]]:
    """Returns the topic's settings, as a whole and one by one, and why they are not accepted.

    If they are not, those of the store are the first result.
    """
    store = view.store.settings
    own: dict[str, Any] = {}
    policies: dict[str, Any] = {}
    try:
        policies = view.namespace_policies()
        own = view.own_settings()
        return accepted(view.topic, store, own, policies), in_effect(store, own, policies), []
    except DescriptorError as error:
        return store, in_effect(store, own, policies), [str(error)]


def _cursors(view: TopicView) -> list[CursorFacts]:
    """The cursors that are not those of subscriptions."""
    resources = view.store.resources()
    if resources is None:
        return []
    found = (
        CursorFacts(name, each.position, len(each.ranges), each.updated_ms)
        for name, each in read_cursors(resources.catalog, view.topic)
        if subscription_of_cursor(name) is None
    )
    return list(islice(found, CURSORS_LISTED))


def _segment_facts(segment: Segment, record: TopicRecord, why: str | None) -> SegmentFacts:
    return SegmentFacts(
        str(segment.path),
        segment.first_offset,
        segment.end_offset,
        segment.size,
        segment.end_offset <= record.tail,
        segment.end_offset <= record.verified,
        why is None,
        why,
    )


def _listed(view: TopicView, limit: int, end: int) -> tuple[list[ObjectDescriptor], Totals]:
    """Returns the last objects before `end`, without their indexes, and the totals of all."""
    resources = view.store.resources()
    if resources is None:
        return [], Totals()
    catalog = resources.catalog
    found = catalog.get_last_object_descriptors(view.topic, limit, end, decoder=decode_outline)
    totals = catalog.totals(view.topic)
    start = skip_holes(view.record or TopicRecord(), view.start_offset)
    whole = end == OFFSET_MAX and (not found or found[0].start_offset <= start)
    if totals.next is not None and whole and limit:  # all of them are here to be counted
        totals = Totals(len(found), sum(each.size for each in found))
    return found, totals


def _outlines(view: TopicView, start: int) -> list[ObjectDescriptor]:
    """Returns the objects from the one that holds `start`, without their indexes."""
    resources = view.store.resources()
    found: list[ObjectDescriptor] = []
    while resources is not None and (
        page := resources.catalog.get_object_descriptors_range(
            view.topic, start, decoder=decode_outline
        )
    ):
        found += page
        start = page[-1].next_offset
    return found


def _object_facts(each: ObjectDescriptor, record: TopicRecord) -> ObjectFacts:
    ledger = parse_ledger(each.object_id)
    return ObjectFacts(
        each.object_id,
        each.start_offset,
        each.next_offset,
        each.size,
        each.created_at,
        each.next_offset <= record.verified,
        each.codec,
        each.logical_size,
        None if ledger is None else ledger.ledger_id,
    )


def _gaps(listed: Sequence[ObjectDescriptor], record: TopicRecord) -> Iterator[str]:
    for before, each in pairwise(listed):
        if each.start_offset != skip_holes(record, before.next_offset):
            yield (
                f"{each.object_id} does not begin at {before.next_offset}, where the object "
                "before it ends"
            )


def _problems(view: TopicView) -> Iterator[str]:
    """Yields violations of the invariants that the catalog and the local directory show."""
    record = view.record
    if record is None:
        return
    if is_restoring(record.log_id):
        begun, command = unfinished(record.log_id)
        yield f"{begun} of the topic is not finished: run `{command}` again"
    segments = view.segments()
    if segments and segments[0].first_offset > record.tail:
        yield (
            f"the objects end at offset {record.tail}, but the local log begins at "
            f"{segments[0].first_offset}: the messages in between are missing"
        )


def kept_because(
    segments: Sequence[Segment],
    record: TopicRecord | None,
    descriptors: Sequence[ObjectDescriptor],
    settings: DeleterSettings,
    now_ms: int,
) -> list[str | None]:
    """Returns why retention would keep each segment now; None if it would delete it. No I/O."""
    wanted = Deleter(settings).choose(
        segments, committed_offset=OFFSET_MAX, pinned=(), now_ms=now_ms
    )
    due = {segment.seq for segment in wanted}
    lag = settings.deletion_lag_minutes
    lag_ms = inf if lag is None else lag * 60_000
    reasons: list[str | None] = []
    for at, segment in enumerate(segments):
        reason = None
        if at == len(segments) - 1:
            reason = "it holds the newest message"
        elif record is None or segment.end_offset > max(record.verified, record.start_offset):
            reason = "not all of it is in verified objects"
        elif segment.seq not in due:
            reason = "it is not old enough, and the log is not too large"
        elif segment.end_offset > record.start_offset and any(
            now_ms - each.created_at * 1000 < lag_ms
            for each in descriptors
            if each.start_offset < segment.end_offset and each.next_offset > segment.first_offset
        ):
            reason = "its objects are younger than the deletion lag"
        elif any(each is not None for each in reasons):
            reason = "an older segment has to go first"
        reasons.append(reason)
    return reasons


# ---- one offset -------------------------------------------------------------------------------


def explain(view: TopicView, offset: int) -> OffsetFacts:
    """Returns where the message at `offset` is stored, or why it is not."""
    record = view.record or TopicRecord()
    facts = OffsetFacts(str(view.topic), offset, "stored")
    hole = record.hole_kind(offset)
    if hole is not None:
        facts.state, facts.go_on_at = hole, skip_holes(record, offset)
        return facts
    if offset >= view.end_offset:
        facts.state = "not yet synced" if view.has_local_log else "not yet uploaded"
        return facts
    facts.synced = True
    facts.uploaded = offset < record.tail
    facts.verified = offset < record.verified
    _add_segment(view, facts)
    if facts.uploaded:
        _add_object(view, facts)
    if not facts.places and not facts.problems:
        facts.state = "missing"
        if offset < view.start_offset:
            facts.state, facts.go_on_at = "removed", view.start_offset
        else:
            facts.problems.append("it should be in a segment or an object, but is in neither")
    return facts


def _add_segment(view: TopicView, facts: OffsetFacts) -> None:
    segments = view.segments()
    held = [each for each in segments if each.first_offset <= facts.offset < each.end_offset]
    if not held:
        return
    segment = held[0]
    descriptors = view.objects(segments[0].first_offset)
    settings, now_ms = _settings(view)[0].deleter, view.store.clock.now_ms()
    reasons = kept_because(segments, view.record, descriptors, settings, now_ms)
    facts.kept_because = reasons[segments.index(segment)]
    facts.deletable = facts.kept_because is None
    try:
        position, size = _in_segment(view, segment, facts.offset)
    except (CorruptLog, OSError) as error:
        facts.problems.append(str(error))
    else:
        facts.places.append(FrameLocation("segment", str(segment.path), position, size))


def _in_segment(view: TopicView, segment: Segment, offset: int) -> tuple[int, int]:
    """Returns the position and length of the frame of `offset`."""
    expected, position = view.indexes.seek(segment, offset)
    chunks = ChunkReader()
    file = view.store.disk.open_read(segment.path)
    try:
        while True:
            found = chunks.read(file, position, segment.size, expected)
            if not len(found):
                require_complete(found, segment.path, position)
                raise CorruptLog(f"{segment.path} ends before offset {offset}")
            if offset <= found.offsets[-1]:
                row = offset - found.offsets[0]
                at, size = found.positions[row] - HEADER_BYTES, found.lengths[row] + HEADER_BYTES
                return position + at, size
            position += found.safe_length
            expected = found.offsets[-1] + 1
    finally:
        file.close()


def _add_object(view: TopicView, facts: OffsetFacts) -> None:
    resources = view.store.resources()
    assert resources is not None, "the record came from there"
    found = resources.catalog.get_object_descriptors_range(
        view.topic, facts.offset, facts.offset + 1, 1
    )
    if not found:
        return
    key = object_key(view.topic, found[0].object_id)
    try:
        facts.places.append(_in_object(view, found[0], key, facts.offset))
    except (CorruptLog, DescriptorError, ServiceError) as error:
        facts.problems.append(str(error))


def _in_object(
    view: TopicView, descriptor: ObjectDescriptor, key: str, offset: int
) -> FrameLocation:
    """Returns where the frame of `offset` is.

    Reads the object from the last indexed frame before it.
    """
    resources = view.store.resources()
    assert resources is not None
    require_known_form(view.topic, descriptor)
    expected, begin = descriptor.seek(offset)
    decoder = object_decoder(descriptor, expected, begin, offset)
    for start in range(begin, descriptor.size, MIB):
        end = min(start + MIB, descriptor.size)
        at = decoder.position
        for found in decoder.feed(resources.store.get_range(key, start, end)):
            if offset <= found.offsets[-1]:
                row = offset - found.offsets[0]
                inside = found.positions[row] - found.positions[0]
                size = found.lengths[row] + HEADER_BYTES
                if isinstance(decoder, BlockAssembler):
                    block = decoder.block_position
                    return FrameLocation("object", key, block, size, descriptor.codec, inside)
                if isinstance(decoder, EntryAssembler):
                    return FrameLocation("object", key, decoder.positions[row], size)
                return FrameLocation("object", key, at + inside, size)
            at += len(found.raw)
        damage = decoder.corruption
        if damage is not None:
            raise CorruptFrame(
                damage.reason, file=key, position=damage.position, offset=damage.offset
            )
    raise CorruptLog(f"{resources.store.name}: {key} ends before offset {offset}")
