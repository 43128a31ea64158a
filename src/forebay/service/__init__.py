"""The process behind `forebay up` and `forebay serve`: the store, its servers, and Spark's driver.

    service     the process itself: checks, servers, signals, stop
    directory   the data directory: its lock, the store's id and the server's address
    jobs        the queue of jobs on Spark, and the pipeline's cycles
    driver      the Spark driver, a separate process that is monitored and restarted
    demo        the load of `forebay demo`

To add a server of another kind beside the HTTP server, implement `service.Listener`.
"""
