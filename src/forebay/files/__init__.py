"""The local disk: `disk` is the interface, `local` implements it with system calls."""
