"""One topic's write-ahead log.

Each module imports only modules below it in this list:

    log          `Wal`: append, wait, read, retain, shut down
    commit       `GroupCommit`: the queue, back-pressure, the single writer, the waiters
    view         `LogView`: the log as another process reads it
    reader       readers, for threads and for asyncio
    journal      writes, syncs and rotates the files
    identity     which log a directory holds, and who may write to it
    recovery     rebuilds the state of a log from its files
    retention    which segments may be deleted
    checkpoints  checkpoints, the published position, the lock on the directory
    segment      segments, their indexes, and reading frames from them
    pool         the threads that all logs share for writing
    memory       frames in memory: queued and cached
    watermarks   how far the log has got, and the waiters for each stage
    metrics      the log's metrics
"""
