"""One topic's write-ahead log: append, group commit, rotation, recovery, readers, retention."""
