"""The hash of an object's content, and what its messages say."""

from __future__ import annotations

from hashlib import sha256

from hypothesis import given
from hypothesis import strategies as st

from forebay.format.content import ContentHash, MessageSurvey
from forebay.format.frame import encode_frame, scan
from forebay.format.message import MessageId, StreamMessage, encode_message
from forebay.limits import OFFSET_MAX


@given(st.lists(st.binary(max_size=50), max_size=8))
def test_the_hash_does_not_depend_on_how_the_bytes_are_cut(pieces: list[bytes]) -> None:
    cut = ContentHash()
    for piece in pieces:
        cut.add(memoryview(piece))
    assert cut.value == f"sha256:{sha256(b''.join(pieces)).hexdigest()}"


def frame_of(offset: int, topic: str, publish_time: int) -> bytes:
    message = StreamMessage(b"x", msg_id=MessageId(1, topic), publish_time=publish_time)
    return encode_frame(offset, encode_message(message, offset))


def test_a_survey_knows_the_highest_publish_time_and_the_first_message_of_another_topic() -> None:
    survey = MessageSurvey("/default/mine")
    survey.add(scan(frame_of(5, "/default/mine", 70) + frame_of(6, "/default/mine", 90)))
    assert (survey.highest_publish_time, survey.foreign_offset) == (90, None)
    survey.add(scan(frame_of(7, "", 80) + frame_of(8, "/default/other", 3)))
    survey.add(scan(frame_of(9, "/default/third", 80)))
    assert (survey.highest_publish_time, survey.foreign_offset) == (90, 8)


def test_no_publish_time_is_known_if_a_message_cannot_be_decoded() -> None:
    survey = MessageSurvey()
    survey.add(scan(frame_of(0, "", 70) + encode_frame(1, b"\xff" * 30)))
    survey.add(scan(frame_of(2, "", 90)))
    assert survey.highest_publish_time is None


def test_a_publish_time_that_fits_no_descriptor_is_left_out() -> None:
    survey = MessageSurvey()
    survey.add(scan(frame_of(0, "", OFFSET_MAX + 1)))
    assert survey.highest_publish_time is None
