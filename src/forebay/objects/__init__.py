"""The object store: one interface, `backend`, and an implementation for each kind of store."""
