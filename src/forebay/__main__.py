"""`python -m forebay` is the command line; so is this file, where one has to be submitted."""

import os
import sys

# Run as a file, the first place to import from is this package's own directory, where `inspect`
# hides Python's module of that name.
if sys.path and os.path.realpath(sys.path[0]) == os.path.realpath(__file__).rpartition(os.sep)[0]:
    del sys.path[0]

from forebay.cli import main

main()
