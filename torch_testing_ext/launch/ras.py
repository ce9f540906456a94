"""NCCL's own status of a job: the answer of its RAS subsystem, which listens in the processes that use NCCL.

A line of text over TCP is the question; the answer is a text that ends with the connection. NCCL has had it since 2.24.
"""

import socket
from collections.abc import Mapping
from contextlib import suppress

from .rank_report import now

# Of each job that runs at the same time on a machine, "host:port".
ADDRESS = "NCCL_RAS_ADDR"
_QUESTION = b"verbose status\n"
# NCCL gives processes that do not answer 5 s, and says then which ones these are.
ANSWER_TIMEOUT = 8.0
# Characters that a report shows.
_MOST = 20_000


def ask(environ: Mapping[str, str], timeout: float = ANSWER_TIMEOUT) -> str:
    """NCCL's status of the job with this environment; "" if nobody answers at an address that is the job's own."""
    host, _, port = environ.get(ADDRESS, "").rpartition(":")
    if not host or not port.isdecimal() or environ.get("NCCL_RAS_ENABLE") == "0":
        return ""
    answer = _answer((host.strip("[]"), int(port)), timeout)
    text = answer.decode(errors="replace")[:_MOST]
    lines = (line.rstrip() for line in text.splitlines())
    return "\n".join(filter(None, lines))


def _answer(address: tuple[str, int], timeout: float) -> bytes:
    """Ask, and read until the end of the answer, or as much as has come in time."""
    until = now() + timeout
    answer = b""
    with suppress(OSError), socket.create_connection(address, timeout=timeout) as connection:
        connection.sendall(_QUESTION)
        while len(answer) < _MOST:
            seconds = until - now()
            if seconds <= 0:
                break
            connection.settimeout(seconds)
            data = connection.recv(1 << 16)
            if not data:
                break
            answer += data
    return answer


def section(answer: str) -> str:
    """The part of a report that shows the answer."""
    lines = (f"  {line}" for line in answer.splitlines())
    return "\n".join(("NCCL's own status (RAS):", *lines))
