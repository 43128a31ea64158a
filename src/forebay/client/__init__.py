"""A running server, as other processes reach it: where it is, and a client for its HTTP.

Used by the command line and by Spark's drivers and executors. It imports nothing heavy: a command
that only asks a question must start quickly.
"""

from forebay.client.address import ServerNote, find_server, is_id, read_note, server_file
from forebay.client.http import Answer, ServerClient

__all__ = [
    "Answer",
    "ServerClient",
    "ServerNote",
    "find_server",
    "is_id",
    "read_note",
    "server_file",
]
