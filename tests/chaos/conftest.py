"""Failures of the whole path: asserts of the shared modules say what they compared."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("topic_evidence", "store_workers")
