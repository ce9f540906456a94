"""The address by which other nodes reach this one."""

from __future__ import annotations

import socket
from contextlib import suppress

_ELSEWHERE = "192.0.2.1"  # no machine has it (RFC 5737): the route there is the one to the world
_LOOPBACK = "127.0.0.1"


def own_address() -> str:
    """That of the interface by which packets leave this machine; else what its name means; else the loopback one."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((_ELSEWHERE, 9))  # sends nothing
        return str(probe.getsockname()[0])
    with suppress(OSError):
        return socket.gethostbyname(socket.gethostname())
    return _LOOPBACK
