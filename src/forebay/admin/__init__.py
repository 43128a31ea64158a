"""The HTTP server: messages, topics, jobs, metrics, what executors need, and the page.

    server    sockets and connections           messages      POST of messages: append
    app       all routes, put together          consume       GET of messages: read and follow
    context   what the handlers share           topics, jobs  what they are named after
    guard     token, origin, request metrics    executors     segments and objects as bytes
    errors    an error's HTTP status            sink_commits  batches of the Spark sink
    request   query and body of a request       operations    routes with their OpenAPI document
    records   bodies as typed structures        page/         what the page in the browser shows

Handlers are asyncio on top of the engine's threads: a call that may wait for a disk or a network
runs on a thread, never on the event loop.
"""
