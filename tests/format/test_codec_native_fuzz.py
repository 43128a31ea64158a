"""The C core of the codec under the sanitizers: see `support/fuzz_codec.c`.

`FOREBAY_FUZZ_ITERATIONS` raises the count for a soak; a thousand take about a second.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

from support.paths import ROOT, SUPPORT

NATIVE: Final = ROOT.resolve() / "native"
ITERATIONS: Final = int(os.environ.get("FOREBAY_FUZZ_ITERATIONS", "2000"))
SANITIZED: Final = (
    "-std=c11",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
    "-g",
    "-O1",
)


def _compiler() -> str:
    named = os.environ.get("CC")
    for name in (named,) if named else ("cc", "gcc", "clang"):
        if found := shutil.which(name):
            return found
    pytest.skip("no C compiler")


def _run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _skip_without_sanitizers(compiler: str, directory: Path) -> None:
    source, program = directory / "nothing.c", directory / "nothing"
    source.write_text("int main(void) { return 0; }\n")
    if _run(compiler, *SANITIZED, source, "-o", program).returncode or _run(program).returncode:
        pytest.skip("the C compiler has no address sanitizer (libasan, libubsan)")


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("fuzz")
    compiler = _compiler()
    _skip_without_sanitizers(compiler, directory)
    program = directory / "fuzz_codec"
    fuzz = SUPPORT.resolve() / "fuzz_codec.c"
    sources = (*(NATIVE / name for name in ("codec.c", "ledger.c", "pulsar_columns.c")), fuzz)
    built = _run(compiler, *SANITIZED, f"-I{NATIVE}", *sources, "-o", program)
    assert built.returncode == 0, built.stderr
    return program


@pytest.mark.timeout(300 + ITERATIONS // 20)
def test_damaged_input_makes_the_core_neither_overread_nor_lie(fuzzer: Path) -> None:
    ran = _run(fuzzer, "1", str(ITERATIONS))
    assert ran.returncode == 0, ran.stderr
