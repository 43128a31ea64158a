"""The limit of open files is raised as far as it may be."""

from __future__ import annotations

import resource
from pathlib import Path

from forebay.service.service import Service
from forebay.settings import AdminSettings, StoreSettings


def test_a_service_may_open_as_many_files_as_it_is_allowed_to(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, before[1] - 1), before[1]))
        settings = StoreSettings(data=tmp_path, admin=AdminSettings(listen="127.0.0.1:0"))
        Service(settings, spark=False).close()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
