"""What ran where, and when: one lane per device and per CPU slot, for the timeline and the trace. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from ..model import Attempt, Lease
from .recorder import History, Span


@dataclass(frozen=True)
class Lane:
    """A device or CPU slot, and what ran on it."""

    name: str  # "gpu 3", "cpu 0"
    is_device: bool
    spans: tuple[Span, ...]
    attempts: tuple[Attempt, ...]


def lanes(history: History) -> list[Lane]:
    """All lanes of the inventory, also those on which nothing ran: idle devices should be visible."""
    spans: dict[str, list[Span]] = defaultdict(list)
    attempts: dict[str, list[Attempt]] = defaultdict(list)
    for span in history.spans:
        for name in _names(span.lease):
            spans[name].append(span)
    for attempt in history.attempts:
        for name in _names(attempt.lease):
            attempts[name].append(attempt)
    everything = Lease(history.run.devices, tuple(range(history.run.slots)))
    devices = len(history.run.devices)
    return [
        Lane(name, number < devices, tuple(spans[name]), tuple(attempts[name]))
        for number, name in enumerate(_names(everything))
    ]


def _names(lease: Lease) -> Iterator[str]:
    yield from (f"gpu {device}" for device in lease.devices)
    yield from (f"cpu {slot}" for slot in lease.slots)
