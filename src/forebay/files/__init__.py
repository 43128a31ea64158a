"""The local disk as a port: `disk` is the interface, `local` the machine's own."""
