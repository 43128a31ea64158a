"""The process behind `forebay up` and `forebay serve`: the store, its servers, and Spark's driver.

    service     the process itself: checks, servers, signals, stop
    directory   the data directory: locked, with the store's id and the server's address
    jobs        the queue of jobs on Spark, and the pipeline's cycles
    driver      the Spark driver, a process of its own that is watched and restarted
    demo        the load of `forebay demo`

The HTTP server is one of the service's servers; another kind takes a place beside it.
"""
