"""The lanes of a run, for the timeline and the trace."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch_testing_ext._process.words import grouped
from torch_testing_ext.runner.events import RunBegan
from torch_testing_ext.runner.model import Attempt, Lease, Span

from .recorder import History


@dataclass(frozen=True)
class Lane:
    """A device or CPU slot, and what ran on it."""

    # "gpu 3", "cpu 0".
    name: str
    is_device: bool
    spans: tuple[Span, ...]
    attempts: tuple[Attempt, ...]


def all_lanes(history: History) -> list[Lane]:
    """All lanes of the inventory, also those on which nothing ran: idle devices should be visible."""
    spans = grouped((name, span) for span in history.spans for name in lanes_of(span.lease))
    attempts = grouped((name, attempt) for attempt in history.attempts for name in lanes_of(attempt.lease))
    # Nodes may join a run.
    everything = [*_inventory(history.run), *(span.lease for span in history.spans)]
    names = dict.fromkeys((lease.node, name) for lease in everything for name in lanes_of(lease))
    nodes = list(dict.fromkeys(node for node, _ in names))
    return [
        Lane(name, name.rpartition(" ")[0].endswith("gpu"), tuple(spans.get(name, ())), tuple(attempts.get(name, ())))
        for _, name in sorted(names, key=lambda lane: nodes.index(lane[0]))
    ]


def _inventory(run: RunBegan) -> list[Lease]:
    """All that a run may lease: of this machine, or of each node."""
    if run.nodes:
        return [Lease(node.devices, tuple(range(node.slots)), node=node.name) for node in run.nodes]
    return [Lease(run.devices, tuple(range(run.slots)))]


def lanes_of(lease: Lease) -> Iterator[str]:
    """The names of the lanes on which the tests with a lease are drawn."""
    on = f"{lease.node} " if lease.node else ""
    yield from (f"{on}gpu {device}" for device in lease.devices)
    yield from (f"{on}cpu {slot}" for slot in lease.slots)
