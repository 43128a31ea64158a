"""A running server as other processes reach it: its address, its HTTP, and its disk and objects.

Used by the command line and by Spark's drivers and executors. `address` imports nothing heavy: a
command that only asks a question starts quickly.
"""
