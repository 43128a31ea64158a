"""Where things are in this repository."""

from pathlib import Path
from typing import Final

SUPPORT: Final = Path(__file__).parent
TESTS: Final = SUPPORT.parent
ROOT: Final = TESTS.parent
