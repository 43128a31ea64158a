"""`survey` of the plain codec and of its compiled twin: the same facts, the same refusals."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.format import pure
from forebay.format.frame import encode_frame
from forebay.format.message import MessageId, StreamMessage, encode_message
from support.codec_twins import ANY_ORDER, logs, same


def log_of(*told: tuple[str, int]) -> bytes:
    frames = []
    for offset, (topic, time) in enumerate(told):
        message = StreamMessage(b"x", msg_id=MessageId(1, topic), publish_time=time)
        frames.append(encode_frame(offset, encode_message(message, offset)))
    return b"".join(frames)


def surveyed(log: bytes, topic: bytes) -> object:
    _, positions, lengths, *_ = pure.scan(log, 0, -1, ANY_ORDER)
    return same("survey", log, positions, lengths, topic)


def test_the_highest_publish_time_and_the_first_foreign_topic_are_told() -> None:
    log = log_of(("/default/t", 5), ("", 9), ("/default/other", 7), ("/default/t", 1))
    assert surveyed(log, b"/default/t") == (9, -1, 2)
    assert surveyed(log[: len(log) // 2], b"/default/t") == (9, -1, -1)
    assert surveyed(log, b"/default/tt") == (9, -1, 0)
    assert surveyed(b"", b"/default/t") == (0, -1, -1)


def test_what_follows_an_undecodable_message_is_not_looked_at() -> None:
    log = log_of(("/default/t", 5)) + encode_frame(1, b"\xff" * 30) + log_of(("/default/o", 9))
    assert surveyed(log, b"/default/t") == (5, 1, -1)


@given(logs(), st.sampled_from([b"/default/t", b"t", b"", b"/"]))
def test_the_highest_publish_time_is_that_of_the_columns(log: bytes, topic: bytes) -> None:
    found = surveyed(log, topic)
    _, positions, lengths, *_ = pure.scan(log, 0, -1, ANY_ORDER)
    times, *_, bad = pure.columns(log, positions, lengths)
    assert isinstance(found, tuple)
    assert found[:2] == (max(times, default=0), bad)


@pytest.mark.parametrize(
    ("positions", "lengths"),
    [(b"1234567", b"1234"), (bytes(8), bytes(8)), (array("Q", [0]), array("I", [99]))],
)
def test_columns_that_do_not_fit_are_refused_alike(positions: bytes, lengths: bytes) -> None:
    assert same("survey", b"some bytes", positions, lengths, b"t") is ValueError
