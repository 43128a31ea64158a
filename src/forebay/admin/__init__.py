"""HTTP: messages in and out, what is where, jobs, metrics, and the page that shows it all.

`site` is what the handlers share, `app` puts the routes together, `server` listens. Handlers are
asyncio on top of the engine's threads: what may wait for a disk or a network runs on a thread.
"""
