"""Messages of torch's errors that tell whose fault an error is.

Most errors of collectives are a RuntimeError, or one of its subclasses DistBackendError, DistNetworkError and
DistStoreError, and each of these types stands for several causes: only the message tells them apart.
"""

from __future__ import annotations

import re

_LOST_PEER = re.compile(
    # gloo's pairs and TCPStore's sockets, with the system's words for the errno
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|closed by peer|connection lost"
    # NCCL, as ProcessGroupNCCL reports it
    r"|remote process exited|NCCL.*(remote error|communicator was aborted)"
    # TCPStore, and the exchange of NCCL's unique id over it
    r"|recvValue failed|sendBytes failed|socket (timeout|error)|failed to recv",
    re.IGNORECASE,
)
# gloo's waits, TCPStore, HashStore ("Wait timeout")
_GAVE_UP = re.compile(r"timed out waiting|timed out after .* waiting|wait timeout", re.IGNORECASE)
_PORT_IN_USE = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)


def says_peer_is_lost(message: str) -> bool:
    """Tell whether a collective or a store failed because the process at its other end has gone. torch 2.11 to 2.15."""
    return bool(_LOST_PEER.search(message))


def says_wait_timed_out(message: str) -> bool:
    """Tell whether a collective or a store gave up waiting for other ranks. torch 2.11 to 2.15."""
    return bool(_GAVE_UP.search(message))


def says_port_is_in_use(message: str) -> bool:
    """Tell whether a store or a backend could not listen, since a port is in use. torch 2.11 to 2.15."""
    return bool(_PORT_IN_USE.search(message))
