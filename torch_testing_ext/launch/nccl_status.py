"""NCCL's own status of a job: the answer of its RAS subsystem, which listens in the processes that use NCCL.

Lines of text over TCP are the questions; the answer is JSON that ends with the connection. NCCL has had that since
2.28.9, which is the oldest of the versions of torch that we support.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from torch_testing_ext._process.words import grouped, size_in_words

from .environment import ADDRESS
from .own_report import now

_QUESTION = b"SET FORMAT json\nVERBOSE STATUS\n"
# NCCL gives processes that do not answer 5 s, and says then which ones these are.
ANSWER_TIMEOUT = 8.0
_MOST_BYTES = 1 << 24


@dataclass(frozen=True)
class NcclRank:
    """The state of one process in NCCL: of its communicators, the most serious one counts."""

    # It gives no answer to NCCL, or not for one of its communicators.
    is_missing: bool = False
    # NCCL has given it up.
    is_dead: bool = False
    # The number of NCCL's error, or 0.
    error: int = 0
    is_aborted: bool = False
    # How many collectives it has called in each communicator.
    calls: Mapping[str, int] = field(default_factory=dict)

    @property
    def trouble(self) -> str:
        """The trouble that it has, as a part of a sentence; "" without any."""
        if self.is_dead:
            return "NCCL considers it dead"
        if self.is_missing:
            return "NCCL gets no answer from it"
        if self.error:
            return f"NCCL reports error {self.error}"
        return "NCCL has aborted its communicator" if self.is_aborted else ""


@dataclass(frozen=True)
class NcclStatus:
    """The answer: the processes of a job, by their pids."""

    version: str = ""
    processes: Mapping[int, NcclRank] = field(default_factory=dict)


def ask_nccl(environ: Mapping[str, str], timeout: float = ANSWER_TIMEOUT) -> NcclStatus | None:
    """NCCL's status of the job with this environment; None if nobody answers at an address that is the job's own."""
    host, _, port = environ.get(ADDRESS, "").rpartition(":")
    if not host or not port.isdecimal() or environ.get("NCCL_RAS_ENABLE") == "0":
        return None
    return read_status(_answer((host.strip("[]"), int(port)), timeout))


def _answer(address: tuple[str, int], timeout: float) -> bytes:
    """Ask, and read until the end of the answer, or as much as has come in time."""
    until = now() + timeout
    answer = b""
    with suppress(OSError), socket.create_connection(address, timeout=timeout) as connection:
        connection.sendall(_QUESTION)
        while len(answer) < _MOST_BYTES:
            seconds = until - now()
            if seconds <= 0:
                break
            connection.settimeout(seconds)
            data = connection.recv(1 << 16)
            if not data:
                break
            answer += data
    return answer


def read_status(answer: bytes) -> NcclStatus | None:
    """Read an answer: a line for the first question, and a document. None for what is neither, or not complete."""
    _, _, document = answer.partition(b"\n")
    try:
        status = json.loads(document)
        communicators = status["communicators"]
        found = [
            (process["pid"], _process(communicator["hash"], process))
            for communicator in communicators
            for process in (*communicator["ranks"], *communicator["missing_ranks"])
        ]
        return NcclStatus(str(status["nccl_version"]), {pid: _joined(parts) for pid, parts in grouped(found).items()})
    except (ValueError, KeyError, TypeError):
        return None


def _process(communicator: str, process: Mapping[str, Any]) -> NcclRank:
    """The state of a process in one communicator, which lists it in its `ranks` or its `missing_ranks`."""
    status = process["status"]
    if "considered_dead" in status:
        return NcclRank(is_missing=True, is_dead=bool(status["considered_dead"]))
    calls = sum(process["collective_counts"].values())
    return NcclRank(
        error=int(status["async_error"]), is_aborted=bool(status["abort_flag"]), calls={communicator: calls}
    )


def _joined(parts: Sequence[NcclRank]) -> NcclRank:
    calls: dict[str, int] = {}
    for part in parts:
        calls.update(part.calls)
    return NcclRank(
        any(part.is_missing for part in parts),
        any(part.is_dead for part in parts),
        max(part.error for part in parts),
        any(part.is_aborted for part in parts),
        calls,
    )


def suspects(ranks: Mapping[int, NcclRank]) -> tuple[tuple[int, ...], str]:
    """The ranks on which the others seem to wait, and why, as the end of a sentence about them; none if all are alike.

    Those that NCCL has lost; otherwise those that have called fewer collectives than others of a communicator.
    """
    dead = tuple(number for number, rank in ranks.items() if rank.is_dead)
    missing = tuple(number for number, rank in ranks.items() if rank.is_missing)
    for lost, reason in ((dead, "dead, according to NCCL:"), (missing, "NCCL gets no answer from")):
        if lost and len(lost) < len(ranks):
            return lost, reason
    for communicator in dict.fromkeys(name for rank in ranks.values() for name in rank.calls):
        calls = {number: rank.calls[communicator] for number, rank in ranks.items() if communicator in rank.calls}
        most = max(calls.values())
        behind = tuple(number for number, count in calls.items() if count < most)
        if behind:
            return behind, "NCCL has seen fewer collectives from"
    return (), ""


# What NCCL may need of /dev/shm: containers have 64 MiB unless they are told otherwise.
_ENOUGH = 512 << 20
# torch's error of a backend, which only NCCL raises.
ERROR_OF_NCCL = "DistBackendError"


def hint(shared_memory: str = "/dev/shm") -> str:
    """Advice for a failure or a hang of NCCL that nothing else explains."""
    try:
        folder = os.statvfs(shared_memory)
    except OSError:
        size = None
    else:
        size = folder.f_blocks * folder.f_frsize
    if size is not None and size < _ENOUGH:
        return f"{shared_memory} has {size_in_words(size)}, NCCL may need more: docker run --shm-size=1g"
    return "with NCCL_P2P_DISABLE=1 it passes if transfers between GPUs are blocked"
