"""Opens the topics of a store behind a server that already listens.

Every topic with a local log is opened: what was synced and not uploaded goes on its way, and what a
crash left is mended, without anybody asking for the topic. One that cannot be opened is told and
tried again; it does not keep the others, or the server, from their work.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import Final

from forebay.errors import ForebayError, LogClosed
from forebay.format.names import parse_topic
from forebay.logs import event
from forebay.topic.store import Store

_log: Final = logging.getLogger("forebay.service")
_AT_A_TIME: Final = 4
_AGAIN_SECONDS: Final = 10.0


class TopicOpener:
    """`run` ends when all are open, or it is cancelled."""

    def __init__(
        self,
        store: Store,
        told: Callable[[str | None], None],
        *,
        again_seconds: float = _AGAIN_SECONDS,
    ) -> None:
        """`told` gets how far it is, in words, and None when every topic was tried once."""
        self._store = store
        self._told = told
        self._again_seconds = again_seconds
        self._told_of: dict[str, str] = {}
        """Why each that cannot be opened cannot."""

    async def run(self) -> None:
        left = await asyncio.to_thread(self._with_local_log)
        left = await self._pass(left, self._told)
        self._told(None)
        while left:
            await asyncio.sleep(self._again_seconds)
            left = await self._pass(left, lambda _words: None)

    def _with_local_log(self) -> list[str]:
        with self._store.view() as view:
            return [name for name in view.topics() if view.directory(parse_topic(name)).is_dir()]

    async def _pass(self, names: list[str], told: Callable[[str | None], None]) -> list[str]:
        """Opens them, a few at a time; answers those that could not be opened."""
        failed: list[str] = []
        done = 0

        async def work(todo: Iterator[str]) -> None:
            nonlocal done
            for name in todo:
                if not await asyncio.to_thread(self._open, name):
                    failed.append(name)
                done += 1
                told(f"opening topics: {done} of {len(names)} are open")

        todo = iter(names)
        await asyncio.gather(*(work(todo) for _ in range(_AT_A_TIME)))
        return failed

    def _open(self, name: str) -> bool:
        try:
            self._store.topic(name)
        except LogClosed:  # the server stops
            return True
        except (ForebayError, OSError) as error:
            if self._told_of.get(name) != str(error):  # once, not with each try
                self._told_of[name] = str(error)
                event(
                    _log,
                    logging.ERROR,
                    "a topic cannot be opened; it is tried again",
                    topic=name,
                    error=error,
                )
            return False
        return True
