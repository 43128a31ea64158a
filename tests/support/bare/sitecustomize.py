"""Makes Spark, Arrow, pandas and NumPy impossible to import, as if they were not installed.

Python imports a module of this name when it starts, so `PYTHONPATH=tests/support/bare` is enough
for a process and its children. `importlib.util.find_spec` does not find the packages either.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, Final

BLOCKED: Final = frozenset({"pyspark", "pyarrow", "pandas", "numpy"})


class BlockingFinder(PathFinder):
    """Finds everything on the path but the blocked packages."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Any = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] in BLOCKED:
            return None
        return PathFinder.find_spec(fullname, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = BlockingFinder
