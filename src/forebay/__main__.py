"""`python -m forebay` is the command line."""

from forebay.cli import main

main()
