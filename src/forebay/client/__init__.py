"""Access to a running server from other processes: its address, HTTP, segments and objects.

The command line and Spark's drivers and executors use it. `address` imports nothing that is slow to
import, so that short commands start quickly.
"""
