"""An exception at every bytecode of a call of the catalog: it works afterwards, and closes."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from forebay.catalog.kv import Compare, Put
from forebay.catalog.sqlite import SqliteKv
from support.opcodes import interrupt_everywhere

SAMPLES = 100
"""Bytecodes in the short run; the soak takes them all."""


class ReadAndWrite:
    def __init__(self, kv: SqliteKv) -> None:
        self.kv = kv

    def act(self) -> None:
        self.kv.get("a")
        self.kv.commit([], [Put("a", b"new")])

    def check(self) -> None:
        found = self.kv.get("a")
        revision = 0 if found is None else found.revision
        assert self.kv.commit([Compare("a", revision)], [Put("a", b"old")]) is not None
        again = self.kv.get("a")
        assert again is not None
        assert again.value == b"old"
        assert not self.kv._file._loans


@pytest.mark.parametrize(
    "samples", [SAMPLES, pytest.param(None, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])]
)
def test_an_interrupt_at_a_bytecode_of_a_call_leaves_the_catalog_usable(
    tmp_path: Path, samples: int | None
) -> None:
    kv = SqliteKv(tmp_path / "catalog.db", timeout_seconds=1)
    total = interrupt_everywhere(partial(ReadAndWrite, kv), "catalog", samples)
    print("ReadAndWrite", total)
    kv.close()
