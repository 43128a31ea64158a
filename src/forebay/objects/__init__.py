"""The object store: one port, and a backend for each kind of store."""
