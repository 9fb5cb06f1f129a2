"""A free port for an engine that listens on TCP."""

import socket


def free_loopback_port() -> int:
    """A port of 127.0.0.1 that nobody holds at this moment.

    Another process may take it before the engine does; whoever uses this must make sure that the one who answers there
    is its own engine.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
