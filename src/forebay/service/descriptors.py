"""How many files and connections the process may have open: as many as it is allowed to.

A log has three files open, and the usual soft limit of 1,024 is for programs that cannot count
further. A process may raise its own soft limit up to the hard one.
"""

from __future__ import annotations

import logging
import resource
from typing import Final

from forebay.logs import event

_log: Final = logging.getLogger("forebay.service")
_FEW: Final = 4096


def raise_descriptors() -> int:
    """Raises the soft limit to the hard one, and answers it; where it is low, that is told."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (OSError, ValueError) as error:  # more than the kernel gives anybody
            event(_log, logging.WARNING, "the limit of open files stays as it is", error=str(error))
    if soft != resource.RLIM_INFINITY and soft < _FEW:
        event(
            _log,
            logging.WARNING,
            "few files may be open: a topic needs three, and a connection one; raise the hard "
            "limit (ulimit -Hn, LimitNOFILE=)",
            limit=soft,
        )
    return soft
