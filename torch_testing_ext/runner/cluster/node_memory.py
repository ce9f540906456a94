"""The watch over the memory of a node, which ends the unit that uses most before the kernel or Ray does.

Ray would end the agent, whoever has the memory, and with it all units of the node; the kernel would end any
process.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch_testing_ext._machine.machine_memory import MachineMemory, MemoryUse
from torch_testing_ext._process.event_loop import EventLoop
from torch_testing_ext._process.words import size_in_words
from torch_testing_ext.runner.engine.running_unit import RunningUnit

LOOK_AT_NODE_MEMORY = 0.2
# The share of the node's memory above which a unit is ended. Ray ends the agent at 0.95, the kernel somebody at 1.
MOST_SHARE = 0.9
# Below that of Ray, if Ray has been given another one: by how much.
BELOW_RAY = 0.05
# If all units together have less than this share of the node's memory, ending one would not help.
LEAST_SHARE = 0.1


@dataclass
class MemoryWatch:
    """Looks at the memory of the node from time to time."""

    loop: EventLoop
    memory: MachineMemory
    most_share: float
    # All that run on this node.
    units: Callable[[], Mapping[int, RunningUnit]]
    warn: Callable[[str], object]
    _ended: RunningUnit | None = None
    _has_warned: bool = False

    def __post_init__(self) -> None:
        self.loop.after(0.0, self._look)

    def _look(self) -> None:
        self.loop.after(LOOK_AT_NODE_MEMORY, self._look)
        use = self.memory.use()
        units = tuple(self.units().values())
        if use is None or use.share < self.most_share:
            return
        if units and self._ended not in units:
            self._relieve(use, units)

    def _relieve(self, use: MemoryUse, units: Sequence[RunningUnit]) -> None:
        """End the unit that uses most, if that helps."""
        sizes = [unit.memory() for unit in units]
        together = sum(sizes)
        if together < LEAST_SHARE * use.limit:
            if not self._has_warned:
                self._has_warned = True
                self.warn(
                    f"it is at {use}, of which tests use {size_in_words(together)}: if more is used, it may be lost"
                )
            return
        largest = max(sizes)
        self._ended = units[sizes.index(largest)]
        for_others = len(units) > 1
        which = f"of the {len(units)} units there, this one used most" if for_others else "this unit used"
        self._ended.end_for_memory(f"the node was at {use}; {which}: {size_in_words(largest)}", for_others)


def most_share(of_ray: str = "") -> float:
    """Above which share of its memory a node ends units. `of_ray`: the value of RAY_memory_usage_threshold there."""
    try:
        rays = float(of_ray) if of_ray else 1.0
    except ValueError:
        rays = 1.0
    return max(0.0, min(MOST_SHARE, rays - BELOW_RAY))
