"""Notes on the test that runs in this process, for the runner of the tests.

Warnings for the user; processes that ranks have left running, and that were ended: a test that passes but leaves
some has *leaked*; the most device memory that each rank has had; and what the faults of a sweep did.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

# The most that each device had: its number, bytes in tensors, bytes that torch has reserved.
Peaks = tuple[tuple[int, int, int], ...]


class KitWarning(NamedTuple):
    """Something that the user should know although the test passes."""

    text: str
    reason: str = ""  # which may differ between processes, as by the names of threads

    def __str__(self) -> str:
        return f"{self.text}, because {self.reason}" if self.reason else self.text


class Notes(NamedTuple):
    """All notes since the last ones were taken."""

    warnings: tuple[KitWarning, ...]
    left_running: tuple[str, ...]
    memory: tuple[Peaks, ...]
    sweeps: tuple[Any, ...]


# The report of the run that this process belongs to begins with what its options leave out.
has_header = False
_warnings: list[KitWarning] = []
_left_running: list[str] = []
_memory: dict[int, Peaks] = {}
_sweeps: list[Any] = []


def warn_user(text: str, reason: str = "") -> None:
    """Print a warning on stderr, and note it."""
    warning = KitWarning(text, reason)
    _warnings.append(warning)
    with suppress(Exception):  # a test may have closed or replaced it
        print(f"torch_testing_ext: {warning}", file=sys.stderr, flush=True)


def note_left_running(processes: Iterable[str]) -> None:
    """Note processes, described by the rank that has left them, pid and command."""
    _left_running.extend(processes)


def note_memory(peaks: Mapping[int, Peaks]) -> None:
    """Note the most memory that each of some ranks has had; nothing of those that have used no device.

    A rank may say it twice: persistent ranks say it for the last test of their class, and once more when they end.
    """
    for rank, of_rank in peaks.items():
        most = {device: (allocated, reserved) for device, allocated, reserved in _memory.get(rank, ())}
        for device, allocated, reserved in of_rank:
            before = most.get(device, (0, 0))
            most[device] = max(allocated, before[0]), max(reserved, before[1])
        if most:
            _memory[rank] = tuple((device, *sizes) for device, sizes in most.items())


def note_sweep(report: Any) -> None:
    """Note what the faults of a sweep did, or why a test has none: a `SweepReport`."""
    _sweeps.append(report)


def forget_memory() -> None:
    """Another test begins: what was noted before is not its own."""
    _memory.clear()


def take_notes() -> Notes:
    """Return all notes since the last call."""
    notes = Notes(tuple(_warnings), take_left_running(), tuple(_memory.values()), tuple(_sweeps))
    _warnings.clear()
    _memory.clear()
    _sweeps.clear()
    return notes


def take_left_running() -> tuple[str, ...]:
    """Return the processes that were noted since the last call, and nothing else: for the end of a fixture."""
    processes = tuple(_left_running)
    _left_running.clear()
    return processes
