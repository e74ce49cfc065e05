"""Checks that a server can listen on an address before the model is loaded."""

import socket


def check_address(host: str, port: int) -> None:
    """Raise ValueError when the port cannot be bound on every address of the host."""
    try:
        for family, kind, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            with socket.socket(family, kind) as listener:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(address)
    except OSError as error:
        raise ValueError(f"serve: cannot listen on {host}, port {port}: {error.strerror}") from error
