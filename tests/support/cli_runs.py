"""Running commands in this process, and the stores that they are run on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from forebay.cli import main
from forebay.settings import DeleterSettings, StoreSettings, UploaderSettings, WalSettings
from forebay.topic.store import Store


def run(*args: str | Path, stdin: str = "", env: Mapping[str, str] | None = None) -> Result:
    none = {"FOREBAY_CONFIG": None, "FOREBAY_DATA": None}
    return CliRunner().invoke(
        main, [str(arg) for arg in args], input=stdin, env={**none, **(env or {})}
    )


def done(*args: str | Path, stdin: str = "", code: int = 0) -> str:
    """What the command says, which ends as it should."""
    result = run(*args, stdin=stdin)
    assert result.exit_code == code, result.output
    return result.stdout


def facts(*args: str | Path, code: int = 0) -> Any:
    """The one JSON document that the command says."""
    return json.loads(done(*args, "--json", code=code))


def refused(*args: str | Path, env: Mapping[str, str] | None = None) -> str:
    """The one line that a refused command says."""
    result = run(*args, env=env)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("forebay: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


def small_segments(data: Path) -> StoreSettings:
    """A store that uploads when it is told to, and deletes what it may."""
    return StoreSettings(
        data=data,
        wal=WalSettings(rotate_max_bytes=2000),
        uploader=UploaderSettings(enabled=False),
        deleter=DeleterSettings(retention_size_mb=0, deletion_lag_minutes=0),
    )


def make_tiered(data: Path, *, uploaded: int = 60, local: int = 40) -> None:
    """The topic `orders`: messages that are their offsets, some in objects, the rest local."""
    with Store(small_segments(data)) as store:
        topic = store.topic("orders")
        for first in range(0, uploaded, 20):
            topic.append_many([b"%d" % n for n in range(first, first + 20)], durability="synced")
            topic.upload()
            topic.rotate()
        topic.append_many([b"%d" % n for n in range(uploaded, uploaded + local)])
        topic.flush()
        topic.trim_local()


def lose_local_log(data: Path) -> None:
    """Removes the logs; the next owner records what was not uploaded as lost."""
    shutil.rmtree(data / "wal")
