"""One topic's write-ahead log.

Each module imports only those below it:

    log          `Wal`: append, wait, read, retain, shut down
    commit       `GroupCommit`: the queue, back-pressure, the one writer, who waits for it
    view         the log as another process reads it
    reader       readers, for threads and for asyncio
    journal      the files as their writer sees them: write, sync, rotate
    identity     which log a directory holds, and who may write it
    recovery     what a log is after a crash
    retention    which segments may be deleted
    checkpoints  checkpoints, the published position, the lock of the directory
    segment      segments, their indexes, and reading frames out of them
    pool         the threads that all logs share for writing
    memory       frames in memory: queued ones and cached ones
    watermarks   how far the log has got, and who waits for it to get further
    metrics      what is counted
"""
