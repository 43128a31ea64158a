"""A running server, as other processes reach it: where it is, and a client for its HTTP.

Used by the command line and by Spark's drivers and executors. It imports nothing heavy: a command
that only asks a question must start quickly.
"""

from forebay.client.address import ServerInfo, find_server, is_id, read_server_info, server_file
from forebay.client.http import Response, ServerClient

__all__ = [
    "Response",
    "ServerClient",
    "ServerInfo",
    "find_server",
    "is_id",
    "read_server_info",
    "server_file",
]
