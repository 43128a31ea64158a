"""The address that a server listens on: checked and bound before anything else starts.

Both servers, HTTP and gRPC, follow the same rules. An address that other machines reach needs a
token. A certificate must be readable and fit its key. Errors name the setting to change.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import ssl
from pathlib import Path
from typing import Final

from forebay.errors import UsageError, remedy
from forebay.settings import AdminSettings, BrokerSettings

_OPTIONS: Final = {"admin": "--listen", "broker": "--broker"}


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the host, by its name or its address."""
    name = host.strip("[]").lower()
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def bind_socket(settings: AdminSettings | BrokerSettings) -> socket.socket:
    """Returns a socket that is bound to `listen`; UsageError if the address cannot be used."""
    section = _section(settings)
    host, port = host_and_port(settings.listen)
    if settings.token is None and not is_loopback(host):
        raise UsageError(
            f"{section}.listen is {settings.listen}, which other machines reach, and "
            f"{section}.token is not set: set a token, or listen on 127.0.0.1"
        )
    _require_certificate(settings)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise UsageError(bind_error(settings, error)) from error
    return bound


def host_and_port(listen: str) -> tuple[str, int]:
    """The two parts of `host:port`; an IPv6 address without its brackets."""
    host, _, port = listen.rpartition(":")
    return host.strip("[]"), int(port)


def shown_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bind_error(settings: AdminSettings | BrokerSettings, error: OSError) -> str:
    section, listen = _section(settings), settings.listen
    option = _OPTIONS[section]
    if error.errno == errno.EADDRINUSE:
        return (
            f"{listen} is taken by another process: stop that one, or choose another address with "
            f"{option} or {section}.listen (port 0 takes a free one)"
        )
    return f"cannot listen on {listen}: {error.strerror}; choose another address with {option}"


def _section(settings: AdminSettings | BrokerSettings) -> str:
    return "admin" if isinstance(settings, AdminSettings) else "broker"


def _require_certificate(settings: AdminSettings | BrokerSettings) -> None:
    """UsageError, with the files, for a certificate that cannot be used."""
    if settings.cert_file is None or settings.key_file is None:
        return
    section = _section(settings)
    for name, file in (("cert_file", settings.cert_file), ("key_file", settings.key_file)):
        try:
            Path(file).read_bytes()
        except OSError as error:
            raise UsageError(
                f"{section}.{name} {file} cannot be read: {error.strerror}; {remedy(error)}"
                if error.errno != errno.ENOENT
                else f"{section}.{name} {file} does not exist"
            ) from error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(settings.cert_file, settings.key_file)
    except OSError as error:  # an SSLError is one
        raise UsageError(
            f"{section}.cert_file {settings.cert_file} and {section}.key_file "
            f"{settings.key_file} are not a certificate and its private key in PEM ({error})"
        ) from error
