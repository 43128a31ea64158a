"""The topics of a streaming query, as its long-lived planner sees them.

Views stay open from trigger to trigger and are moved forward, not made anew; a topic is planned
when there is something of it to read. One of these lives in the process that Spark keeps for a
query's source. It holds no bytes of messages.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from forebay.errors import UsageError
from forebay.format.names import TopicName, parse_topic
from forebay.limits import MIB
from forebay.logs import event
from forebay.pipeline.options import ScanOptions
from forebay.pipeline.scan_batch import open_view, range_of
from forebay.pipeline.scan_pieces import Piece, Split, splits
from forebay.pipeline.scan_plan import KnownPlaces, plan_topic, recut
from forebay.pipeline.stream_offsets import Positions, TopicEnds
from forebay.pipeline.stream_sizes import TopicRuler
from forebay.pipeline.workbench import workbench
from forebay.topic.view import StoreView, TopicView

_log: Final = logging.getLogger("forebay.pipeline")

WORTH_A_TASK_BYTES: Final = 4 * MIB
"""What is smaller shares a task: one costs Spark some 15 ms, in which so much is read."""


class _Topic:
    """One topic: a view of it, and what was learned about its bytes."""

    def __init__(self, store: StoreView, topic: TopicName) -> None:
        self.view = TopicView(store, topic)
        self._note()

    def refresh(self) -> None:
        self.view.refresh()
        segments = self.view.segments()
        if segments and segments[-1].path != self._newest:
            self._note()  # a sealed segment has an index of its own
        else:
            self.places.note(self.view)

    def _note(self) -> None:
        segments = self.view.segments()
        self._newest = segments[-1].path if segments else None
        self.places = KnownPlaces()
        self.places.note(self.view)
        self.ruler = TopicRuler(self.view, self.places)

    @property
    def ends(self) -> TopicEnds:
        return TopicEnds(self.view.start_offset, max(self.view.end_offset, self.view.start_offset))


class StreamTopics:
    """Not thread-safe. `close` when the query stops."""

    def __init__(self, options: ScanOptions) -> None:
        self._options = options
        self._store = open_view(options.settings)
        self._topics: dict[TopicName, _Topic] = {}

    def close(self) -> None:
        self._topics.clear()
        self._store.close()

    def first(self) -> Positions:
        """Where a new query begins, as the options say. UsageError for a topic that is not there.

        A pattern may match no topic yet.
        """
        self._options.chosen(self._store.topics())
        self.look()
        self._options.starting.require_named("startingOffsets", list(self._topics))
        bench = workbench(self._options.settings)
        return {
            topic: range_of(bench, each.view, self._options).start
            for topic, each in self._topics.items()
        }

    def look(self) -> dict[TopicName, TopicEnds]:
        """The topics of the subscription that are there now, as far as they are synced."""
        found: dict[TopicName, _Topic] = {}
        for topic in self._subscribed():
            each = self._topics.get(topic)
            try:
                if each is None:
                    each = _Topic(self._store, topic)
                else:
                    each.refresh()
            except UsageError:  # a directory in which no log has begun, or a topic that has gone
                continue
            found[topic] = each
        self._topics = found
        return {topic: each.ends for topic, each in found.items()}

    def _subscribed(self) -> list[TopicName]:
        """Without an error for what is not there: a query that runs tells a loss by itself."""
        names = self._store.topics()
        there = {*names, *(parse_topic(name).base for name in names)}
        topics = tuple(topic for topic in self._options.topics if str(topic) in there)
        return replace(self._options, topics=topics).chosen(names)

    def rulers(self) -> Mapping[TopicName, TopicRuler]:
        return {topic: each.ruler for topic, each in self._topics.items()}

    def ends(self) -> dict[TopicName, TopicEnds]:
        """As of the last look."""
        return {topic: each.ends for topic, each in self._topics.items()}

    def plan(self, ranges: Mapping[TopicName, tuple[int, int]]) -> list[Split]:
        """The tasks that read exactly these offsets, each of which is in its topic."""
        options = self._options
        pieces: list[Piece] = []
        for topic, (start, end) in ranges.items():
            each = self._topics[topic]
            try:
                pieces += self._pieces(each, start, end)
            except FileNotFoundError:  # of a segment that was uploaded and removed meanwhile
                each.refresh()
                pieces += self._pieces(each, start, end)
        size = sum(piece.size for piece in pieces)
        least = max(options.partitions_min, min(_cores(), size // WORTH_A_TASK_BYTES), 1)
        planned = splits(
            pieces,
            options.split_bytes,
            least,
            lambda piece, size: recut(self._topics[piece.topic].view, piece, size),
        )
        event(
            _log,
            logging.DEBUG,
            "batch planned",
            topics=len(ranges),
            splits=len(planned),
            messages=sum(split.count for split in planned),
            bytes=size,
        )
        return planned

    def _pieces(self, each: _Topic, start: int, end: int) -> list[Piece]:
        return plan_topic(
            each.view,
            start,
            end,
            split_bytes=self._options.split_bytes,
            fail_on_data_loss=self._options.fail_on_data_loss,
            places=each.places,
        )


def _cores() -> int:
    """Of this machine: the planner does not know the cluster, `minPartitions` does."""
    return len(os.sched_getaffinity(0))
