"""The metadata of a store (descriptors, ownership, cursors), kept in etcd or in SQLite."""
