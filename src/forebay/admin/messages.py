"""`/v1/topics/{namespace}/{topic}/messages`: POST puts messages in, GET gets them out."""

from __future__ import annotations

from typing import Final

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from forebay.admin.consume import PACE, Consume, Pace
from forebay.admin.intake import STALL_SECONDS
from forebay.admin.problems import problem
from forebay.admin.produce import Produce
from forebay.admin.site import Site

PATH: Final = "/v1/topics/{namespace}/{topic}/messages"
_CLIENT_GONE: Final = 499
"""What the metrics say of a request whose client did not wait for the answer."""


class Messages:
    """An ASGI application, not a function of a request: bodies and answers are streams."""

    def __init__(self, site: Site, pace: Pace, stall_seconds: float) -> None:
        self._produce = Produce(site, stall_seconds=stall_seconds)
        self._consume = Consume(site, pace=pace)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        method = scope["method"]
        if method == "GET":
            await self._consume.answer(scope, receive, send)
            return
        if method == "POST":
            try:
                answer = await self._produce.answer(scope, receive)
            except ClientDisconnect:
                answer = Response(status_code=_CLIENT_GONE)
        else:
            answer = problem(405, "UsageError", "messages are POSTed, and got with GET")
            answer.headers["Allow"] = "GET, POST"
        await answer(scope, receive, send)


def routes(
    site: Site, *, pace: Pace = PACE, stall_seconds: float = STALL_SECONDS
) -> list[BaseRoute]:
    """`stall_seconds` is what a producer gets for the next piece of a body."""
    return [Route(PATH, Messages(site, pace, stall_seconds), name="messages")]
