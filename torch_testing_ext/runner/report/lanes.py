"""Lanes of units, one per device and per CPU slot, for the timeline and the trace. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from ..events import RunBegan
from ..model import Attempt, Lease
from .history import History, Span


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
    everything = [*_inventory(history.run), *(span.lease for span in history.spans)]  # nodes may join a run
    names = dict.fromkeys((lease.node, name) for lease in everything for name in _names(lease))
    nodes = list(dict.fromkeys(node for node, _ in names))
    grouped = sorted(names, key=lambda one: nodes.index(one[0]))
    return [Lane(name, _is_device(name), tuple(spans[name]), tuple(attempts[name])) for _, name in grouped]


def _inventory(run: RunBegan) -> list[Lease]:
    """All that a run may lease: of this machine, or of each node."""
    if run.nodes:
        return [Lease(node.devices, tuple(range(node.slots)), node=node.name) for node in run.nodes]
    return [Lease(run.devices, tuple(range(run.slots)))]


def _names(lease: Lease) -> Iterator[str]:
    on = f"{lease.node} " if lease.node else ""
    yield from (f"{on}gpu {device}" for device in lease.devices)
    yield from (f"{on}cpu {slot}" for slot in lease.slots)


def _is_device(name: str) -> bool:
    return name.rpartition(" ")[0].endswith("gpu")
