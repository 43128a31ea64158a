"""The kinds without structure: string, number and bytes. Their definitions say nothing.

A string is UTF-8, a number is a JSON number in UTF-8, bytes are anything. All definitions of such a
kind are the same schema, so registering one again makes no new version.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from forebay.errors import InvalidPayload

_NUMBER: Final = re.compile(rb"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")


@dataclass(frozen=True, slots=True)
class PlainSchema:
    kind: str

    @property
    def canonical(self) -> bytes:
        return b""

    def unreadable(self, writer: PlainSchema) -> list[str]:
        """Nothing: schemas of one of these kinds are all the same."""
        return [] if writer.kind == self.kind else [f"{self.kind} does not read {writer.kind}"]

    def check(self, payload: bytes) -> None:
        """Raises InvalidPayload unless the payload is of this kind."""
        if self.kind == "number" and not _NUMBER.fullmatch(payload):
            raise InvalidPayload("the payload is not a number, such as 12 or 1.5e3")
        if self.kind == "string":
            try:
                payload.decode()
            except UnicodeDecodeError:
                raise InvalidPayload("the payload is not UTF-8") from None
