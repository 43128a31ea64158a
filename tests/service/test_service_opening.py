"""Topics are opened behind the server: all that can be, and the others again and again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import forebay
from forebay.service.service import TopicOpener


async def test_every_topic_with_a_local_log_is_opened(tmp_path: Path) -> None:
    names = [f"/default/t{number}" for number in range(10)]
    with forebay.open(tmp_path) as store:
        for name in names:
            store.topic(name).append(b"x")
    progress: list[str | None] = []
    with forebay.open(tmp_path) as store:
        await asyncio.wait_for(TopicOpener(store, progress.append).run(), 120)
        assert all(store.opened(name) is not None for name in names)
    assert "10 of 10" in (progress[-2] or "")
    assert progress[-1] is None


async def test_a_topic_that_cannot_be_opened_is_told_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with forebay.open(tmp_path) as store:
        store.topic("/default/a").append(b"x")
        store.topic("/default/b").append(b"x")
    other = forebay.open(tmp_path)
    other.topic("/default/a")
    tried = asyncio.Event()
    with forebay.open(tmp_path) as store:
        opener = TopicOpener(
            store, lambda words: tried.set() if words is None else None, retry_seconds=0.05
        )
        opening = asyncio.create_task(opener.run())
        await asyncio.wait_for(tried.wait(), 120)
        assert store.opened("/default/b") is not None
        assert store.opened("/default/a") is None
        assert "a topic cannot be opened" in caplog.text
        other.close()
        await asyncio.wait_for(opening, 120)
        assert store.opened("/default/a") is not None
