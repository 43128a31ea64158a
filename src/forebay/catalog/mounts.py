"""Which kind of file system a path is on: SQLite's locks do not hold over a network.

Linux's `/proc/self/mountinfo` has a line for each mount: numbers, the mounted root, the mount
point (blanks as `\\040`), options, ` - `, and the type:

    36 35 98:0 / /mnt/shared rw,noatime shared:1 - nfs4 server:/export rw

Downside: a network file system of a type that is not in the list below passes.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from forebay.errors import InvalidSetting

_SHARED: Final = re.compile(
    "9p|afs|beegfs|ceph|cifs|coda|gfs2?|glusterfs|gpfs|lustre|ncpfs|nfs4?|ocfs2|orangefs|pvfs2|"
    "smb2|smb3|smbfs|fuse\\.(?:ceph|ceph-fuse|curlftpfs|davfs|gcsfuse|geesefs|glusterfs|goofys|"
    "juicefs|mfs|moosefs|mount-s3|mountpoint-s3|rclone|s3fs|sshfs)"
)


def filesystem_type(path: Path, mountinfo: str) -> str | None:
    """Of the mount that `path`, an absolute one, is on; None if no line says it."""
    found: tuple[int, str] | None = None
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields = left.split(" ")
        if len(fields) < 5 or not right:
            continue
        point = Path(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4]))
        deep = len(point.parts)
        # Of two mounts on one point the later covers the earlier.
        if path.is_relative_to(point) and (found is None or deep >= found[0]):
            found = (deep, right.split(" ")[0])
    return None if found is None else found[1]


def require_local(path: Path, mountinfo: str | None = None) -> None:
    """InvalidSetting if the file would be on a file system that several machines share."""
    if mountinfo is None:
        source = Path("/proc/self/mountinfo")
        if not source.exists():
            return
        mountinfo = source.read_text(encoding="utf-8", errors="surrogateescape")
    kind = filesystem_type(path.parent.resolve(), mountinfo)
    if kind is not None and _SHARED.fullmatch(kind):
        raise InvalidSetting(
            f"metadata.path is {path}, which is on a network file system ({kind}): SQLite's locks "
            "do not hold there; put it on a local disk, or use etcd"
        )
