"""The metadata: descriptors, ownership and cursors, in etcd or in SQLite."""
