"""The annotated hex dumps of `docs/formats/`, as bytes.

A dump is a fenced block marked `hex`: lines of hex bytes, each followed by a `#` comment or not.
"""

from __future__ import annotations

import re
from typing import Final

from support.paths import ROOT

FORMATS: Final = ROOT / "docs" / "formats"
_BLOCK: Final = re.compile(r"^```hex\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(document: str) -> list[bytes]:
    """All hex dumps of one document, in their order."""
    text = (FORMATS / document).read_text(encoding="utf-8")
    return [
        bytes.fromhex("".join(line.partition("#")[0] for line in block.splitlines()))
        for block in _BLOCK.findall(text)
    ]


def block(document: str, number: int) -> bytes:
    """One hex dump; the house rules look for these calls to know which dumps are tested."""
    return blocks(document)[number]
