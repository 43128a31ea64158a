"""The process behind `forebay up` and `forebay serve`: the store, its servers, and Spark's driver.

The HTTP server is one of its servers; another kind takes a place beside it. The driver of the
Spark jobs is a process of its own, watched and started again.
"""
