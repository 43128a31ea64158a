"""A key filter matches what its definition says, in time that a client cannot blow up."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from forebay.dispatch.key_filter import KeyFilter
from forebay.limits import KEY_CHARACTERS_MAX, KEY_FILTER_CHARACTERS_MAX
from support.subscription_model import matches

GLOBS = st.text("ab*?", min_size=1, max_size=8)
KEYS = st.text("abc", max_size=8)


@given(glob=GLOBS, key=KEYS)
@example(glob="a*a", key="a")
@example(glob="ab*ba", key="aba")
@example(glob="?*a", key="ba")
@example(glob="*?", key="")
def test_a_filter_matches_what_its_definition_says(glob: str, key: str) -> None:
    assert KeyFilter(glob).matches(key) == matches(glob, key)


@pytest.mark.parametrize(
    ("glob", "key", "is_match"),
    [
        ("eu-*", "eu-", True),
        ("eu-*", "EU-1", False),
        ("eu", "eu-1", False),
        ("a.c", "abc", False),
        ("[ab]", "a", False),
        ("[ab]", "[ab]", True),
        ("?", "\U0001f600", True),
        ("a?c", "a\nc", True),
        ("*\n*", "a\nb", True),
        ("\\*", "\\x", True),
    ],
)
def test_only_star_and_question_mark_are_special(glob: str, key: str, is_match: bool) -> None:
    assert KeyFilter(glob).matches(key) is is_match


@pytest.mark.parametrize("glob", ["*a" * 128, "*a?" * 85, "?*" * 128, "*" * 256])
def test_a_filter_that_would_backtrack_for_ever_answers(glob: str) -> None:
    assert len(glob) <= KEY_FILTER_CHARACTERS_MAX
    key = "a" * (KEY_CHARACTERS_MAX - 1) + "b"
    assert KeyFilter(glob).matches(key) == glob.endswith(("*", "?"))


@pytest.mark.parametrize(("glob", "everything"), [("*", True), ("**", True), ("*?", False)])
def test_a_filter_knows_whether_it_takes_everything(glob: str, everything: bool) -> None:
    assert KeyFilter(glob).everything is everything
