"""`CheckpointStore`: a topic's two checkpoint files, each replaced atomically and kept in memory.

What a caller gets wrong: `read_wal` answers None both for a missing and for an unusable file (the
latter is logged and kept aside). Neither is an error, because the segments tell the same story.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final, TypeVar

from forebay.errors import CheckpointError
from forebay.files.disk import Disk, read_file, replace_file
from forebay.format.checkpoint import (
    UploaderCheckpoint,
    WalCheckpoint,
    decode_checkpoint,
    encode_checkpoint,
)
from forebay.format.names import CHECKPOINT_FILE, UPLOADER_CHECKPOINT_FILE
from forebay.limits import CHECKPOINT_BYTES_MAX
from forebay.logs import event

_log: Final = logging.getLogger("forebay.wal")
_Kind = TypeVar("_Kind", WalCheckpoint, UploaderCheckpoint)


class CheckpointStore:
    def __init__(self, disk: Disk, directory: Path) -> None:
        self._disk = disk
        self._wal_path = directory / CHECKPOINT_FILE
        self._uploader_path = directory / UPLOADER_CHECKPOINT_FILE
        self._wal = self._load(self._wal_path, WalCheckpoint)
        self._uploader = self._load(self._uploader_path, UploaderCheckpoint)

    def get_wal(self) -> WalCheckpoint | None:
        return self._wal

    def get_uploader(self) -> UploaderCheckpoint | None:
        return self._uploader

    def update_wal(self, checkpoint: WalCheckpoint) -> None:
        """Returns when the checkpoint would survive a power loss."""
        replace_file(self._disk, self._wal_path, encode_checkpoint(checkpoint))
        self._wal = checkpoint

    def update_uploader(self, checkpoint: UploaderCheckpoint) -> None:
        """Returns when the checkpoint would survive a power loss."""
        replace_file(self._disk, self._uploader_path, encode_checkpoint(checkpoint))
        self._uploader = checkpoint

    def _load(self, path: Path, kind: type[_Kind]) -> _Kind | None:
        if not self._disk.exists(path):
            return None
        try:
            data = read_file(self._disk, path, bytes_max=CHECKPOINT_BYTES_MAX)
            return decode_checkpoint(data, kind)
        except (CheckpointError, ValueError) as error:
            kept = path.with_name(path.name + ".unusable")
            text = "a checkpoint is kept aside, and rebuilt from the segments"
            event(_log, logging.WARNING, text, file=path, kept=kept.name, error=error)
            self._disk.replace(path, kept)
            return None
