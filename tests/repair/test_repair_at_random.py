"""Damage of all kinds at random places: a repair restores what is whole in some other copy.

Whatever it cannot restore it reports.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from forebay.errors import ForebayError, LostOffsets
from forebay.format.frame import HEADER_BYTES, scan
from forebay.repair.repair import repair
from forebay.settings import DeleterSettings, StoreSettings, UploaderSettings, WalSettings
from forebay.topic.store import Store

COUNT = 100
LOG = Path("wal/default/orders")
OBJECTS = Path("objects/storage/topics/default/orders/objects")


class Shape(NamedTuple):
    """How a store came to be: where uploads were, and whether uploaded segments were removed."""

    uploads: tuple[int, ...]
    trimmed: bool


SHAPES = (
    Shape((), trimmed=False),
    Shape((30, 60), trimmed=False),
    Shape((30, 60), trimmed=True),
    Shape((20, 40, 60, 80, 100), trimmed=True),
)


class Model(NamedTuple):
    data: Path
    shape: Shape
    frames: list[bytes]
    """The bytes of each message's frame, by offset; the same in segments and objects."""


def settings_of(data: Path) -> StoreSettings:
    return StoreSettings(
        data=data,
        wal=WalSettings(rotate_max_bytes=2000),
        uploader=UploaderSettings(enabled=False),
        deleter=DeleterSettings(
            retention_time_minutes=0, deletion_lag_minutes=0, retention_size_mb=1
        ),
    )


def payload(offset: int) -> bytes:
    return b"%d-" % offset * (1 + offset % 7)


def build(data: Path, shape: Shape) -> Model:
    with Store(settings_of(data)) as store:
        topic = store.topic("orders")
        for first in range(0, COUNT + 1, 10):
            if first in shape.uploads:
                topic.upload()
            batch = [payload(offset) for offset in range(first, min(first + 10, COUNT))]
            if batch:
                topic.append_many(batch, durability="synced")
        frames = frames_of(data)
        if shape.trimmed:
            topic.trim_local()
    return Model(data, shape, frames)


def frames_of(data: Path) -> list[bytes]:
    found: dict[int, bytes] = {}
    for path in (data / LOG).glob("*.log"):
        raw = path.read_bytes()
        frames = scan(raw)
        for offset, at, size in zip(frames.offsets, frames.positions, frames.lengths, strict=True):
            found[offset] = raw[at - HEADER_BYTES : at + size]
    return [found[offset] for offset in range(COUNT)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Model]:
    root = tmp_path_factory.mktemp("models")
    return [build(root / str(number), shape) for number, shape in enumerate(SHAPES)]


def live(data: Path) -> Iterator[Path]:
    yield from (data / LOG).glob("wal*.log")
    yield from (data / OBJECTS).glob("*.dnb1")


def whole(data: Path, model: Model) -> set[int]:
    """The offsets whose frames are in any segment or object, at any position."""
    raws = [path.read_bytes() for path in live(data)]
    return {
        offset for offset, frame in enumerate(model.frames) if any(frame in raw for raw in raws)
    }


def damage(dice: random.Random, data: Path, model: Model) -> str:
    files = sorted(path for path in (data / LOG).iterdir() if path.is_file())
    logs = [path for path in files if path.suffix == ".log"]
    # Objects that no segment overlaps are not read by a repair.
    if not model.shape.trimmed and (data / OBJECTS).exists() and dice.random() < 0.3:
        files += sorted((data / OBJECTS).iterdir())
    path = dice.choice([*files, *logs])
    raw = path.read_bytes()
    kind = dice.choice(["flip", "flip", "cut", "gone", "zero", "insert", "append", "swap", "copy"])
    at = dice.randrange(len(raw)) if raw else 0
    some = dice.randrange(1, 60)
    other = dice.choice(logs) if logs else path
    if kind == "gone":
        path.unlink()
    elif kind == "flip" and raw:
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 1 << dice.randrange(8)]) + raw[at + 1 :])
    elif kind == "cut":
        path.write_bytes(raw[:at])
    elif kind == "zero":
        zeros = bytes(min(some * 5, len(raw) - at))
        path.write_bytes(raw[:at] + zeros + raw[at + len(zeros) :])
    elif kind == "insert":
        path.write_bytes(raw[:at] + dice.randbytes(some) + raw[at:])
    elif kind == "append":
        path.write_bytes(raw + dice.randbytes(some))
    elif path in logs and other != path:
        if kind == "swap":
            path.write_bytes(other.read_bytes())
        other.write_bytes(raw)
    return f"{kind} {path.name}"


def read_all(data: Path) -> tuple[dict[int, bytes], set[int], int]:
    """The messages, the lost offsets, and the next offset."""
    found: dict[int, bytes] = {}
    lost: set[int] = set()
    with Store(settings_of(data)) as store:
        topic = store.topic("orders")
        at, end = 0, topic.watermarks().synced
        while at < end:
            try:
                for each in topic.read(at, end=end):
                    found[each.offset] = each.payload
                at = end
            except LostOffsets as error:
                lost |= set(range(error.start, error.end))
                at = error.end
    return found, lost, end


def opens(data: Path) -> bool:
    try:
        read_all(data)
    except ForebayError:
        return False
    return True


def require_sound(models: Sequence[Model], root: Path, seed: int) -> None:
    dice = random.Random(seed)
    model = dice.choice(models)
    data = root / "data"
    shutil.copytree(model.data, data)
    what = [damage(dice, data, model) for _ in range(dice.choice([1, 1, 2, 2, 3]))]
    before = whole(data, model)
    shutil.copytree(data, root / "untouched")
    accept = dice.random() < 0.5
    done = repair(settings_of(data), apply=True, accept_loss=accept)
    case = f"seed {seed}: {what}, {done.findings}"
    assert before <= whole(data, model), case
    if done.left:
        assert opens(data) or not opens(root / "untouched"), case
    else:
        found, lost, end = read_all(data)
        assert all(found[offset] == payload(offset) for offset in found), case
        assert before <= found.keys(), case
        assert not lost & before, case
        assert accept or not lost, case
        assert end > max(before, default=-1), case
        assert repair(settings_of(data)).findings == [], case
    shutil.rmtree(data)
    shutil.rmtree(root / "untouched")


@pytest.mark.parametrize("seed", range(50, 95))
def test_after_any_damage_what_is_somewhere_is_read_back_or_said_to_be_left(
    models: list[Model], tmp_path: Path, seed: int
) -> None:
    require_sound(models, tmp_path, seed)


@pytest.mark.soak
@pytest.mark.parametrize("block", range(100, 2100, 200))
def test_after_much_damage_what_is_somewhere_is_read_back_or_said_to_be_left(
    models: list[Model], tmp_path: Path, block: int
) -> None:
    for seed in range(block, block + 200):
        require_sound(models, tmp_path, seed)
