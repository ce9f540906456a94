"""NCCL's own status of a job: the answer of its RAS subsystem, which listens in the processes that use NCCL.

Lines of text over TCP are the questions; the answer is JSON that ends with the connection. NCCL has had that since
2.28.7, and the oldest torch that we support comes with 2.28.9. The text with which an older one answers counts as none.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from torch_testing_ext._machine.device_sharing import NCCL_SHARES, ranks_per_device
from torch_testing_ext._process.words import grouped, size_in_words
from torch_testing_ext.launch.accounts import now
from torch_testing_ext.launch.rank_variables import ADDRESS

_QUESTION = b"SET FORMAT json\nVERBOSE STATUS\n"
# NCCL gives processes that do not answer 5 s, and says then which ones these are.
ANSWER_TIMEOUT = 8.0
# The first line is answered at once.
FIRST_WORD_TIMEOUT = 1.0
_TRIES = 3
_MOST_BYTES = 1 << 24
# ncclSuccess and ncclInProgress.
_NO_ERROR = (0, 7)


@dataclass(frozen=True)
class NcclRank:
    """The state of one process in NCCL: of its communicators, the most serious one counts."""

    # It gives no answer to NCCL, or not for one of its communicators.
    is_missing: bool = False
    # NCCL has given it up.
    is_dead: bool = False
    # It answers, and is not in a communicator that others have with it.
    is_outside: bool = False
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
        if self.is_aborted:
            return "NCCL has aborted its communicator"
        return "NCCL misses a communicator in it" if self.is_outside else ""


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
    """Ask, and read until the end of the answer, or as much as has come in time.

    All processes of a job listen at its address. One that is stopped says nothing: another try may reach another one.
    """
    until = now() + timeout
    answer = b""
    for _ in range(_TRIES):
        answer = answer or _answer_of_one(address, until)
    return answer


def _answer_of_one(address: tuple[str, int], until: float) -> bytes:
    answer = b""
    first_until = min(until, now() + FIRST_WORD_TIMEOUT)
    with suppress(OSError), socket.create_connection(address, timeout=FIRST_WORD_TIMEOUT) as connection:
        connection.sendall(_QUESTION)
        while len(answer) < _MOST_BYTES:
            seconds = (until if answer else first_until) - now()
            if seconds <= 0:
                break
            connection.settimeout(seconds)
            data = connection.recv(1 << 16)
            if not data:
                break
            answer += data
    return answer


def read_status(answer: bytes) -> NcclStatus | None:
    """Read an answer: a line for the first question, and a document. None for what is neither, or not complete.

    What is not as we know it is left out: other versions of NCCL may say more or less.
    """
    _, begin, rest = answer.partition(b"{")
    try:
        status = json.loads(begin + rest)
    except (ValueError, RecursionError):
        return None
    if not isinstance(status.get("communicators"), list):
        return None
    found = []
    for communicator in _entries(status, "communicators"):
        name = str(communicator.get("hash"))
        found += [(_number(entry, "pid"), _rank(name, entry)) for entry in _entries(communicator, "ranks")]
        found += [(_number(entry, "pid"), _missing(entry)) for entry in _entries(communicator, "missing_ranks")]
    version = str(status.get("nccl_version", ""))
    # NCCL has the pid -1 for a process of which it has lost sight.
    return NcclStatus(version, {pid: _joined(parts) for pid, parts in grouped(found).items() if pid > 0})


def _entries(parent: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    found = parent.get(name)
    return [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []


def _part(parent: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = parent.get(name)
    return found if isinstance(found, dict) else {}


def _number(parent: Mapping[str, Any], name: str) -> int:
    found = parent.get(name)
    return found if isinstance(found, int) else 0


def _rank(communicator: str, entry: Mapping[str, Any]) -> NcclRank:
    """The state of a process in one communicator."""
    status = _part(entry, "status")
    states = [_number(status, name) for name in ("async_error", "init_state")]
    errors = [state for state in states if state not in _NO_ERROR]
    counts = _part(entry, "collective_counts")
    calls = {communicator: sum(_number(counts, name) for name in counts)} if counts else {}
    return NcclRank(error=errors[0] if errors else 0, is_aborted=status.get("abort_flag") is True, calls=calls)


def _missing(entry: Mapping[str, Any]) -> NcclRank:
    """The state of a process that other ranks of a communicator miss."""
    status = _part(entry, "status")
    is_dead = status.get("considered_dead") is True
    # A process may answer, but not as a member: it has not come to the communicator yet, or has left it.
    has_answered = status.get("unresponsive") is False and not is_dead
    return NcclRank(is_missing=not has_answered, is_dead=is_dead, is_outside=has_answered)


def _joined(parts: Sequence[NcclRank]) -> NcclRank:
    calls: dict[str, int] = {}
    for part in parts:
        calls.update(part.calls)
    return NcclRank(
        any(part.is_missing for part in parts),
        any(part.is_dead for part in parts),
        any(part.is_outside for part in parts),
        max(part.error for part in parts),
        any(part.is_aborted for part in parts),
        calls,
    )


def suspects(ranks: Mapping[int, NcclRank]) -> tuple[tuple[int, ...], str]:
    """The ranks on which the others seem to wait, and why, as the end of a sentence about them; none if all are alike.

    Those that NCCL has lost; otherwise those that have called fewer collectives than others of a communicator, or that
    are in none with the others.
    """
    dead = tuple(number for number, rank in ranks.items() if rank.is_dead)
    missing = tuple(number for number, rank in ranks.items() if rank.is_missing)
    outside = tuple(number for number, rank in ranks.items() if rank.is_outside)
    candidates = [(dead, "dead, according to NCCL:"), (missing, "NCCL gets no answer from")]
    for communicator in dict.fromkeys(name for rank in ranks.values() for name in rank.calls):
        calls = {number: rank.calls[communicator] for number, rank in ranks.items() if communicator in rank.calls}
        behind = tuple(number for number, count in calls.items() if count < max(calls.values()))
        candidates.append((behind, "NCCL has seen fewer collectives from"))
    candidates.append((outside, "NCCL misses a communicator in"))
    return next(((found, why) for found, why in candidates if 0 < len(found) < len(ranks)), ((), ""))


# What NCCL may need of /dev/shm: containers have 64 MiB unless they are told otherwise.
_ENOUGH = 512 << 20
# torch's error of a backend, which only NCCL raises.
ERROR_OF_NCCL = "DistBackendError"


def hint(shared_memory: str = "/dev/shm") -> str:
    """Advice for a failure or a hang of NCCL that nothing else explains."""
    if ranks_per_device() > 1 and os.environ.get(NCCL_SHARES) != "0":
        return f"ranks that share a GPU may block each other in NCCL: with {NCCL_SHARES}=0 they use gloo"
    try:
        folder = os.statvfs(shared_memory)
    except OSError:
        size = None
    else:
        size = folder.f_blocks * folder.f_frsize
    if size is not None and size < _ENOUGH:
        return f"{shared_memory} has {size_in_words(size)}, NCCL may need more: docker run --shm-size=1g"
    return "with NCCL_P2P_DISABLE=1 it passes if transfers between GPUs are blocked"
