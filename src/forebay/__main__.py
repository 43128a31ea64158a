"""The command line, for `python -m forebay` and for `spark-submit`, which needs a file."""

import os
import sys

# If this is run as a file, sys.path starts with the directory of the package, where
# forebay/inspect.py would hide Python's own module `inspect`.
if sys.path and os.path.realpath(sys.path[0]) == os.path.realpath(__file__).rpartition(os.sep)[0]:
    del sys.path[0]

from forebay.cli import main

main()
